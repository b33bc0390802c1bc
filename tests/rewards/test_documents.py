"""docs/rewards.md describes the existing functions, and its examples work."""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path

import yaml

from megarl.config import load
from megarl.config.schema import Reward
from megarl.preflight.check import check
from megarl.preflight.user_functions import check_functions
from megarl.rewards.adapters import BoundFunction
from megarl.rewards.functions import RULES
from tests.rewards.completions import completion

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "rewards.md").read_text(encoding="utf-8")


def test_every_function_is_documented_with_its_arguments() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (`.*?`) \|", PAGE, flags=re.MULTILINE))
    described = {name: re.findall(r"`(\w+)(?:=(\w+))?`", arguments) for name, arguments in rows.items()}
    assert described == {
        name: [
            (argument.name, _written(argument.default))
            for argument in list(inspect.signature(rule).parameters.values())[1:]
        ]
        for name, rule in RULES.items()
    }


def test_the_example_runs(user_directory: Path) -> None:
    (configuration,) = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    _write_module(user_directory)
    functions = Reward(**yaml.safe_load(configuration)["reward"]).functions
    assert not check_functions(functions)
    given = [completion("Thanks, 7.", answer="#### 7")]
    assert [BoundFunction(function).replies(given) for function in functions[:2]] == [[1.0], [0.5]]


def test_the_run_without_a_model_can_be_planned(user_directory: Path) -> None:
    _write_module(user_directory)
    (command,) = re.findall(r'^    python -c "(.*)"$', PAGE, flags=re.MULTILINE)
    exec(command)
    rows = re.findall(r'^    (\{"prompt": .*\})$', PAGE, flags=re.MULTILINE)
    Path("prompts.jsonl").write_text("\n".join(rows))
    (block,) = re.findall(r"^    defaults: .*\n(?:    .*\n)+", PAGE, flags=re.MULTILINE)
    Path("try.yaml").write_text(textwrap.dedent(block).replace("[configs", f"[{REPOSITORY}/configs"))
    prompts = check(load("try.yaml")).rows["data.prompts"]
    # a token before the text, and one for each character of "Say something: " and "Name some letters: "
    assert [len(prompt.token_ids) for prompt in prompts] == [16, 20]


def _write_module(directory: Path) -> None:
    """Writes the page's own function."""
    (module,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    (directory / "my_rewards.py").write_text(module)


def _written(default: object) -> str:
    """A default as YAML has it; nothing where there is none."""
    if default is None:
        return "null"
    if default is inspect.Parameter.empty:
        return ""
    return f"{default:g}" if isinstance(default, float) else str(default).lower()
