"""Arguments and return values of functions, by scope of a call and by signature."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megarl.config.schema import RewardFunction
from megarl.preflight.user_functions import check_fields, check_functions
from megarl.rewards.adapters import BoundFunction, Failure
from megarl.rewards.functions import Completion, math_verify
from tests.rewards.completions import completion, own, prompt
from tests.rewards.test_overlapping_calls import overlapping

ROW = {"data_source": "sums", "reward_model": {"ground_truth": "2"}}


def chat(response: str, **fields: Any) -> Completion:
    return replace(completion(response, **fields), messages=[{"role": "user", "content": "1+1?"}])


def test_a_list_of_responses_gets_a_score_each() -> None:
    replies = BoundFunction(overlapping("ranks", per="group")).replies([completion(text) for text in ("aa", "a", "")])
    assert replies[:2] == [2, 1]
    assert isinstance(replies[2], Failure)
    assert replies[2].reason == "it returned None, a NoneType: it must return one finite number"


@pytest.mark.parametrize("value", [[1.0], 3.0, {"a": 1.0, "b": 2.0}, "ab", None])
def test_anything_but_a_number_for_each_response_is_refused(value: object) -> None:
    replies = BoundFunction(overlapping("ranks", per="batch")).read(value, 2)
    assert len(replies) == 2
    assert all(isinstance(reply, Failure) and "must return a list of 2 numbers" in reply.reason for reply in replies)


def test_arrays_are_lists_of_scores() -> None:
    bound = BoundFunction(overlapping("ranks", per="batch"))
    assert bound.read(np.float32([0.5, 1]), 2) == [0.5, 1.0]
    assert isinstance(bound.read(np.array([math.nan, 1]), 2)[0], Failure)


def test_a_trl_function_gets_column_lists_and_chat_messages() -> None:
    function = overlapping("trl_reward", adapter="trl")
    assert function.unit == "batch"
    given = [
        completion("a", tokens=3, answer="a", level=1),
        completion("b", answer=None, level=2),
        chat("2", answer="2"),
    ]
    assert BoundFunction(function).replies(given) == [1.03, 0.0, 11.01]


def test_a_verl_function_gets_a_row_and_may_return_a_mapping() -> None:
    penalty = {"penalty": 0.5}
    rows = [completion("2", **ROW), completion("3", **ROW), completion("2", extra_info=penalty, **ROW)]
    scores = [BoundFunction(overlapping("verl_score", adapter="verl")).replies([row])[0] for row in rows]
    assert scores == [1.0, 0.0, 0.5]
    batch = overlapping("verl_batch", adapter="verl", per="batch", args={"bonus": 2.0})
    assert BoundFunction(batch).replies(rows) == [3.0, 2.0, 3.0]
    assert penalty == {"penalty": 0.5}


def test_signatures_are_checked_by_adapter() -> None:
    good = [
        overlapping("trl_reward", adapter="trl"),
        overlapping("trl_short", adapter="trl", args={"scale": 2.0}),
        overlapping("verl_score", adapter="verl"),
        overlapping("crowd"),
    ]
    assert not check_functions(good)
    wrong = {
        "trl_short": overlapping("trl_short", adapter="trl", args={"skale": 2.0}),
        "verl_batch": overlapping("verl_batch", adapter="verl", per="batch"),
        "verl_score": overlapping("verl_score", adapter="verl", args={"solution_str": "x"}),
        "length": own("length").model_copy(update={"adapter": "verl"}),
    }
    for name, function in wrong.items():
        (problem,) = check_functions([function])
        assert problem.field == "reward.functions.0.args", name


@pytest.mark.parametrize(("name", "adapter"), [("trl_reward", "trl"), ("verl_score", "verl")])
def test_a_forgotten_adapter_is_suggested(name: str, adapter: str) -> None:
    (problem,) = check_functions([overlapping(name)])
    assert f"set adapter: {adapter}" in problem.fix


def test_rows_have_the_columns_that_an_adapter_reads() -> None:
    prompts = [prompt("a", answer="x", **ROW), prompt("b", data_source="sums")]
    functions = [overlapping("trl_reward", adapter="trl"), overlapping("verl_score", adapter="verl")]
    problems = check_fields(functions, prompts)
    assert [(problem.field, problem.value) for problem in problems] == [
        (f"reward.functions.{index}.name", function.name) for index, function in enumerate(functions)
    ]
    columns = ("answer", "reward_model")
    assert all(f"reads the column {name}," in problem.rule for name, problem in zip(columns, problems, strict=True))
    assert not check_fields(functions, prompts[:1])


@pytest.mark.parametrize(
    ("answer", "response", "score"),
    [
        (r"\frac{1}{2}", "It is 0.5.", 1),
        (r"\frac{14}{3}", r"So \boxed{\frac{28}{6}}", 1),
        (r"\frac{14}{3}", r"So \boxed{\frac{14}{4}}", 0),
        (r"Therefore $x = \boxed{(3, \frac{\pi}{2})}$.", r"$(3, \pi/2)$", 1),
        ("72", "72 clips", 1),
        ("72", "no answer", 0),
        (5, r"\boxed{5}", 1),
    ],
)
def test_math_verify_compares_values(answer: object, response: str, score: float) -> None:
    assert math_verify(completion(response, answer=answer)) == score


def test_a_reference_answer_that_cannot_be_read_is_an_error() -> None:
    with pytest.raises(ValueError, match="no mathematical expression"):
        math_verify(completion("1", answer=""))


def test_a_missing_package_is_reported_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.preflight.user_functions.find_spec", lambda name: None)
    (problem,) = check_functions([RewardFunction(name="math_verify")])
    assert "pip install -e '.[math]'" in problem.fix
