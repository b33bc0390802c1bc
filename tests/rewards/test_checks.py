"""Mistakes in the names and arguments of reward functions, reported before anything starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megarl.config.schema import RewardFunction
from megarl.preflight.user_functions import check_fields, check_functions
from megarl.rewards.functions import RULES, labels, resolve
from tests.rewards.completions import own, prompt

REPOSITORY = Path(__file__).parents[2]
COMPLETE: dict[str, dict[str, Any]] = {
    "regex": {"pattern": "x"},
    "extracted_match": {"pattern": "(x)"},
    "judge": {"url": "https://host/v1", "model": "m", "template": "{response}", "pattern": "(x)"},
    "soft_overlong": {"max_tokens": 8, "buffer_tokens": 2},
}


def named(name: str, **args: Any) -> RewardFunction:
    return RewardFunction(name=name, args=args)


def test_valid_functions_have_no_problems() -> None:
    functions = [named(name, **COMPLETE.get(name, {})) for name in RULES]
    assert not check_functions([*functions, own("length", scale=2.0), named("math:sqrt")])


@pytest.mark.parametrize(
    ("function", "field", "rule"),
    [
        (named("exact_mach"), "name", "one of contains, exact_match"),
        (named("exact_mach"), "name", "package.module:function"),
        (named("no_such_module:f"), "name", "No module named 'no_such_module'"),
        (named("tests.rewards.functions:lenght"), "name", "tests.rewards.functions has no 'lenght'"),
        (named("tests.rewards.functions:"), "name", "must be written as package.module:function"),
        (named("tests.rewards.broken:f"), "name", 'RATE = {}["no such rate"]'),
        (own("NUMBER"), "name", "of the type int"),
        (own("Length"), "name", "not a class"),
        (own("score"), "name", "none of prompts, response_length,"),
        (own("length", scal=2.0), "args", "functions:length(scale=1.0): got an unexpected keyword argument 'scal'"),
        (own("length", completion=2.0), "args", "multiple values for argument 'completion'"),
        (named("regex"), "args", "regex(pattern, whole=False): missing a required"),
        (named("regex", pattern="("), "args.pattern", "a regular expression: missing )"),
        (named("extracted_match", pattern="(a)(b)"), "args.pattern", "with one group"),
        (named("soft_overlong", max_tokens=8, buffer_tokens=0), "args.buffer_tokens", "greater than or equal to 1"),
        (named("soft_overlong", max_tokens=8, buffer_tokens=9), "args.buffer_tokens", "at most max_tokens = 8"),
        (named("soft_overlong", max_tokens=17, buffer_tokens=9), "args.max_tokens", "rollout.max_new_tokens = 16"),
        (named("soft_overlong", max_tokens="8", buffer_tokens=1), "args.max_tokens", "valid integer"),
        (named("last_number", tolerance=-0.1), "args.tolerance", "greater than or equal to 0"),
    ],
)
def test_a_mistake_is_reported_with_its_field_and_rule(function: RewardFunction, field: str, rule: str) -> None:
    (problem,) = check_functions([named("contains"), function], where="evaluation.functions", longest=16)
    assert problem.field == f"evaluation.functions.1.{field}"
    assert rule in problem.rule


def test_all_mistakes_are_reported_together() -> None:
    wrong = named("soft_overlong", max_tokens=0, buffer_tokens=0)
    fields = [problem.field for problem in check_functions([named("nothing"), wrong])]
    assert fields == [
        "reward.functions.0.name",
        "reward.functions.1.args.max_tokens",
        "reward.functions.1.args.buffer_tokens",
    ]


def test_names_that_collide_after_numbering_are_refused() -> None:
    twice = named("contains", field="a"), named("contains", field="b")
    assert not check_functions(twice)
    (problem,) = check_functions([*twice, own("contains_2")])
    assert problem.field == "reward.functions"
    assert problem.value == "contains_1, contains_2, contains_2"


def test_functions_that_read_text_need_a_tokenizer() -> None:
    functions = [named(name, **COMPLETE.get(name, {})) for name in RULES]
    told = {problem.value for problem in check_functions(functions, tokenizer=False)}
    assert told == set(RULES) - {"soft_overlong"}


def test_fields_missing_in_prompts_are_reported() -> None:
    prompts = [prompt("a", answer="x"), prompt("b", answer="x", key="y"), prompt("c")]
    functions = [named("exact_match"), named("contains", field="key"), named("regex", pattern="x"), own("length")]
    first, second = check_fields(functions, prompts)
    assert first.field == "reward.functions.0.args.field"
    assert first.value == "answer"
    assert "1 of 3 lack it, the first is 'c'" in first.rule
    assert "2 of 3 lack it, the first is 'a'" in second.rule
    assert second.fix == "name one that it has (answer)"
    assert not check_fields(functions[:1], prompts[:2])


def test_duplicate_names_are_numbered_and_custom_names_drop_the_module() -> None:
    functions = [named("regex", pattern="a"), own("length"), named("regex", pattern="b"), named("contains")]
    assert labels(functions) == ("regex_1", "length", "regex_2", "contains")


def test_a_module_of_the_working_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_rewards.py").write_text("def zero(completion):\n    return 0.0\n")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.chdir(tmp_path)
    assert resolve("my_own_rewards:zero")(None) == 0.0


@pytest.mark.process
def test_checking_imports_nothing_heavy() -> None:
    code = (
        "import sys; from megarl.preflight.user_functions import check_functions; "
        "from megarl.config.schema import RewardFunction; "
        "assert not check_functions([RewardFunction(name='contains')]); "
        "print([name for name in ('torch', 'transformers', 'ray') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=REPOSITORY)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
