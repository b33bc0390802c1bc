"""docs/rewards.md describes the functions that there are, and its examples work."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import pytest
import yaml

from megarl.config.schema import Reward
from megarl.rewards import RULES, check_functions
from megarl.rewards.registry import bind
from tests.rewards.answers import answer

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")


def test_every_function_is_described_with_its_arguments() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (`.*?`) \|", PAGE, flags=re.MULTILINE))
    described = {name: re.findall(r"`(\w+)(?:=(\w+))?`", arguments) for name, arguments in rows.items()}
    assert described == {
        name: [
            (argument.name, _written(argument.default))
            for argument in list(inspect.signature(rule.function).parameters.values())[1:]
        ]
        for name, rule in RULES.items()
    }


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (configuration,) = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    (module,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    (tmp_path / "my_rewards.py").write_text(module)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    functions = Reward(**yaml.safe_load(configuration)["reward"]).functions
    assert not check_functions(functions)
    assert [bind(function)(answer("Thanks, 7.", answer="#### 7")) for function in functions] == [1.0, 0.5]


def _written(default: object) -> str:
    """A default as YAML has it; nothing where there is none."""
    if default is inspect.Parameter.empty:
        return ""
    return f"{default:g}" if isinstance(default, float) else str(default).lower()
