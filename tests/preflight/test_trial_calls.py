"""Every reward function is called before anything starts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from examples.sort_letters.checkpoint import tokenizer
from megarl.config import ConfigError, RunConfig, load
from megarl.data.prompts import task_prompts
from megarl.data.sources import LeftOutRows
from megarl.data.tokenizer import Tokenizer
from megarl.environments.python_program import bubblewrap
from megarl.preflight.check import check
from megarl.preflight.datasets import Sets
from megarl.preflight.trial_calls import call_functions
from tests.data.encoded_texts import encoded_lengths
from tests.rewards.test_process import alive

pytestmark = pytest.mark.process

GRPO = Path(__file__).parents[2] / "configs" / "debug" / "grpo.yaml"


def config(functions: Sequence[str], *overrides: str) -> RunConfig:
    named = [{"name": f"tests.rewards.functions:{name}"} for name in functions]
    return load(GRPO, [f"reward.functions={json.dumps(named)}", *overrides])


def refusal(functions: Sequence[str], *overrides: str) -> ConfigError:
    made = config(functions, *overrides)
    with pytest.raises(ConfigError) as caught:
        call_functions(made, check(made))
    return caught.value


def test_functions_that_score_pass() -> None:
    made = config(["length", "process"])
    call_functions(made, check(made))
    sft = load(GRPO.with_stem("sft"))
    call_functions(sft, check(sft))


def test_a_curriculum_draws_a_first_step() -> None:
    made = config(["length"], "data.curriculum=tests.own_functions:every_other")
    call_functions(made, check(made))
    found = refusal(["length"], "data.curriculum={name: 'tests.own_functions:every_other', args: {shift: 0.5}}")
    assert "data.curriculum = tests.own_functions:every_other" in str(found)
    assert "must return 4 different integers from 0 to" in str(found)


def test_a_function_that_fails_is_named_with_the_end_of_its_traceback() -> None:
    error = refusal(["length", "seen", "exits"])
    assert [problem.field for problem in error.problems] == ["reward.functions.1.name", "reward.functions.2.name"]
    first, second = error.problems
    assert first.value == "tests.rewards.functions:seen"
    assert first.rule.endswith("KeyError: 'answer'")
    assert 'completion.fields["answer"] == completion.response' in first.rule
    assert second.rule.endswith("its process ended by exit status 3")


def test_a_function_that_hangs_is_ended_after_its_time_limit() -> None:
    (problem,) = refusal(["sleeps"], "reward.time_limit=0.2").problems
    assert "it took longer than 0.2 s" in problem.rule


def test_a_function_that_hangs_is_called_once(tmp_path: Path) -> None:
    functions = [{"name": "tests.rewards.functions:notes_and_sleeps", "args": {"file": str(tmp_path / "notes")}}]
    made = load(GRPO, [f"reward.functions={json.dumps(functions)}", "reward.time_limit=0.5"])
    with pytest.raises(ConfigError, match=r"it took longer than 0\.5 s"):
        call_functions(made, check(made))
    assert (tmp_path / "notes").read_text() == "called\n"


def test_daemons_of_a_function_end_with_its_trial(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    functions = [{"name": "tests.rewards.functions:starts_a_daemon", "args": {"pid_file": str(pid_file)}}]
    made = load(GRPO, [f"reward.functions={json.dumps(functions)}"])
    call_functions(made, check(made))
    assert not alive(int(pid_file.read_text()))


def test_evaluation_functions_are_called_too() -> None:
    (problem,) = refusal(["length"], 'evaluation.functions=[{name: "tests.rewards.functions:seen"}]').problems
    assert problem.field == "evaluation.functions.0.name"


@pytest.mark.parametrize("unit", ["batch", "group"])
def test_a_function_of_several_responses_is_called_with_two(unit: str) -> None:
    functions = [{"name": "tests.rewards.functions:one_score", "per": unit}]
    made = load(GRPO, [f"reward.functions={json.dumps(functions)}"])
    with pytest.raises(ConfigError, match="list of 2 numbers"):
        call_functions(made, check(made))


def test_a_function_may_fail_on_some_rows() -> None:
    functions = [{"name": "tests.rewards.functions:raises_once_in_a_while", "args": {"every": 4}}]
    made = load(GRPO, [f"reward.functions={json.dumps(functions)}"])
    call_functions(made, check(made))


def test_a_text_of_megabytes_does_not_hold_up_a_trial_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second response that is tried is a text of the row."""
    rows = [{"prompt": "a", "answer": "abcdefgh" * 1_000_000}] * 4
    (tmp_path / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    tokenizer().save_pretrained(tmp_path / "tokenizer")
    data = [f"data.prompts={tmp_path / 'prompts.jsonl'}", f"model.tokenizer={tmp_path / 'tokenizer'}"]
    lengths = encoded_lengths(monkeypatch)
    (problem,) = refusal(["exits"], *data, "evaluation=null", "model.vocab_size=null").problems
    assert problem.rule.endswith("its process ended by exit status 3")
    assert 0 < max(lengths) < 100_000


def begun(environment: str, *overrides: str) -> Sequence[int]:
    """The first prompt of an environment, whose tasks have no rows in a file."""
    given = ["data.prompts=null", "data.tasks=4", "evaluation=null", "model.tokenizer=x", "reward.functions=[]"]
    made = load(GRPO, [*given, f'environment.name="{environment}"', *overrides])
    tokens = Tokenizer(tokenizer(), "characters")
    sets = Sets(rows={"data.prompts": task_prompts(4)}, tokenizer=tokens, left_out=LeftOutRows())
    return call_functions(made, sets)


def test_an_environment_begins_a_conversation() -> None:
    assert tokenizer().decode(begun("tests.conversations.worlds:Letters")).startswith("<bos>say ")


@pytest.mark.parametrize(
    ("environment", "overrides", "rule"),
    [
        ("tests.conversations.worlds:Nobody", (), "must be a class that is derived from"),
        (
            "tests.conversations.worlds:Letters",
            ("environment.args={turns: 3, size: 2}",),
            "unexpected keyword argument",
        ),
        (
            "tests.conversations.worlds:Letters",
            ("rollout.max_model_len=8", "rollout.max_new_tokens=4"),
            "leaves no room for a turn",
        ),
        ("user_turns", ("reward.functions=[{name: length}]",), "the row has no column 'user_turns'; it has: index"),
    ],
)
def test_an_environment_that_cannot_begin_is_refused(environment: str, overrides: Sequence[str], rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        begun(environment, *overrides)
    (problem,) = caught.value.problems
    assert problem.field == "environment.name"
    assert rule in problem.rule


def test_the_tool_python_needs_a_sandbox_unless_that_is_declined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    bubblewrap.cache_clear()
    with pytest.raises(ConfigError) as caught:
        begun("tools", "environment.args={functions: [python]}", "reward.functions=[{name: length}]")
    (problem,) = caught.value.problems
    assert (problem.field, problem.value) == ("environment.args.functions", "python")
    assert "there is no program bwrap" in problem.rule
    assert "environment.args.sandbox=none" in problem.fix
