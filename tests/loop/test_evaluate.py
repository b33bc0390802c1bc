"""Metrics of evaluations, by hand."""

from __future__ import annotations

import itertools
import math
import statistics
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megarl.config.schema import Evaluation, SourceFields
from megarl.loop.evaluate import Evaluator, held_out_metrics
from megarl.loop.scoring import ScoredSamples
from megarl.types import Prompt, SampleInfo, SampleRequest
from tests.loop.answers import answer, info, run

Z = 1.959963984540054
NAN = math.nan


def evaluation(**settings: Any) -> Evaluation:
    return Evaluation(prompts=SourceFields(path="somewhere"), **settings)


def samples(prompts: str) -> list[SampleInfo]:
    """One per letter, of the prompt of that name."""
    return [info(f"0/{prompt}/{index}", prompt, index) for index, prompt in enumerate(prompts)]


def test_means_have_intervals_over_prompts() -> None:
    exact = np.float32([1, 1, 0, 0, 1, 0])
    found = held_out_metrics({"exact": exact}, samples("aabbcc"), evaluation())
    assert (found["prompts"], found["samples"], found["exact"]) == (3, 6, 0.5)
    assert found["exact_ci95"] == pytest.approx(Z * statistics.stdev([1, 0, 0.5]) / math.sqrt(3))
    alone = held_out_metrics({"exact": exact}, samples("abcdef"), evaluation())
    assert alone["exact_ci95"] == pytest.approx(Z * statistics.stdev([1, 1, 0, 0, 1, 0]) / math.sqrt(6))


def test_the_reward_model_is_named_score_and_pass_at_k_uses_the_function() -> None:
    scores = {"reward_model": np.float32([3, 4]), "exact": np.float32([0, 1])}
    found = held_out_metrics(scores, samples("ab"), evaluation(pass_at=[1]))
    assert (found["score"], found["exact"]) == (3.5, 0.5)
    assert {name for name in found if "pass_at" in name} == {"exact_pass_at_1", "exact_pass_at_1_ci95"}
    model = held_out_metrics({"reward_model": np.float32([3, 4])}, samples("ab"), evaluation(pass_at=[1], success_at=4))
    assert model["score_pass_at_1"] == 0.5


def test_pass_at_k_is_the_fraction_of_k_subsets_with_a_success() -> None:
    by_prompt = {"a": [0.2, 0.5, 0.9, 0.1], "b": [0.0, 0.0, 0.5, 0.0], "c": [0.4, 0.4, 0.4, 0.4]}
    values = np.float32([score for own in by_prompt.values() for score in own])
    found = held_out_metrics({"f": values}, samples("aaaabbbbcccc"), evaluation(pass_at=[1, 2, 4], success_at=0.5))
    for k in (1, 2, 4):
        rates = [
            statistics.mean(max(chosen) >= 0.5 for chosen in itertools.combinations(own, k))
            for own in by_prompt.values()
        ]
        assert found[f"f_pass_at_{k}"] == pytest.approx(statistics.mean(rates))
        assert found[f"f_pass_at_{k}_ci95"] == pytest.approx(Z * statistics.stdev(rates) / math.sqrt(3))


def test_samples_without_a_score_are_excluded_and_counted() -> None:
    scores = {"f": np.float32([1, NAN, 0, 0, NAN, NAN]), "g": np.float32([1, 1, NAN, 1, 1, NAN])}
    found = held_out_metrics(scores, samples("aabbcc"), evaluation(pass_at=[1, 2]))
    assert found["f"] == pytest.approx(1 / 3)
    assert (found["unscored"], found["unscored/f"], found["unscored/g"]) == (4, 3, 2)
    assert found["f_pass_at_1"] == 0.5, "of a and b: c has no scored sample"
    assert found["f_pass_at_2"] == 0, "of b alone"
    assert "f_pass_at_2_ci95" not in found
    nothing = held_out_metrics({"f": np.float32([NAN, NAN])}, samples("ab"), evaluation(pass_at=[1]))
    assert not nothing.keys() & {"f", "f_ci95", "f_pass_at_1", "f_pass_at_1_ci95"}
    assert nothing["unscored"] == 2


def test_lengths() -> None:
    ends = ((2, True), (4, True), (9, False))
    given = [info(f"0/a/{row}", "a", row, response_tokens=n, finished=ended) for row, (n, ended) in enumerate(ends)]
    found = held_out_metrics({"f": np.float32([0, 0, 0])}, given, evaluation())
    assert (found["response_length"], found["response_length_max"]) == (5, 9)
    assert found["truncated_fraction"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(("settings", "temperature"), [({"greedy": True}, 0.0), ({"temperature": 0.5}, 0.5)])
def test_an_evaluation_takes_the_devices_for_the_same_requests_every_time(
    settings: dict[str, Any], temperature: float
) -> None:
    calls: list[str] = []
    asked: list[list[SampleRequest]] = []
    answered = samples("ab")

    async def note(call: str) -> None:
        calls.append(call)

    async def scored(*_: Any) -> ScoredSamples:
        return ScoredSamples(samples=answered, scores={"f": np.float32([1, 3])})

    async def require(work: Any) -> Any:
        return await work

    config: Any = SimpleNamespace(
        evaluation=evaluation(**settings),
        run=SimpleNamespace(seed=0),
        tracking=SimpleNamespace(samples=0, tokens=False),
    )
    prompts = [Prompt(prompt_id=id, token_ids=(1,)) for id in "ab"]
    data: Any = SimpleNamespace(tokenizer=None, rows={"evaluation.prompts": prompts})

    def generate(requests: list[SampleRequest], _chunks: int) -> Any:
        asked.append(requests)
        return SimpleNamespace(result=lambda: answer(SimpleNamespace(samples=answered)))

    parts: Any = SimpleNamespace(
        engines=SimpleNamespace(require=require),
        generator=SimpleNamespace(generate=generate),
        scorer=SimpleNamespace(score=scored),
        colocation=SimpleNamespace(to_rollout=lambda: note("rollout"), to_training=lambda: note("training")),
    )
    evaluator = Evaluator(config, data, parts, 1)
    result = run(evaluator.evaluate(4))
    assert calls == ["rollout", "training"]
    assert (result.step, result.metrics["eval/f"]) == (4, 2.0)
    run(evaluator.evaluate(8))
    assert asked[0] == asked[1]
    assert [(each.sample_id, each.temperature) for each in asked[0]] == [("0/a/0", temperature), ("0/b/0", temperature)]
