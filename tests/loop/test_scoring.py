"""From rewards to shaped scores and advantages, by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megarl.algos.reward_shaping import ScoreScale
from megarl.cluster.ray_worker import ChunkRefs
from megarl.config.schema import Algo, EnvironmentSettings, JudgeModel, Reward, RewardFunction, Scores, Selection
from megarl.experience.records import TokenRewardScale
from megarl.groups.rollouts import Rollouts
from megarl.loop.sampler import conversation_metrics, sample_metrics
from megarl.loop.scoring import (
    ENVIRONMENT,
    REWARD_MODEL,
    ScoredBatch,
    ScoredSamples,
    Scorer,
    reward_weights,
    sample_filter,
    score_batch,
    shuffled_order,
    total_scores,
    unscored_metrics,
    with_selection,
    without_scores,
)
from megarl.megatron.worker import MegatronWorker
from megarl.rewards.functions import labels
from megarl.rewards.judge import JUDGE_MODEL
from megarl.types import ConversationOutcome, SampleInfo
from tests.config.debug import debug
from tests.loop.answers import Answered, answer, info, run

NONE = math.nan


def sample(prompt: str, index: int, chunk: int, row: int, *, finished: bool = True, tokens: int = 1) -> SampleInfo:
    lengths = {"prompt_tokens": 3, "response_tokens": tokens}
    return info(f"1/{prompt}/{index}", prompt, row, chunk=chunk, finished=finished, **lengths)


SAMPLES = (
    sample("b", 0, 0, 0),
    sample("a", 0, 0, 1),
    sample("b", 1, 1, 0, finished=False),
    sample("a", 1, 1, 1),
    sample("c", 0, 2, 0),
)
VALUES = np.array([1, 2, 3, 4, 5], np.float32)
ROWS = {0: 2, 1: 2, 2: 1}
"""Samples by chunk."""


def scored_batch(
    found: list[float] | dict[str, list[float]],
    *,
    reward: Reward | None = None,
    greedy: dict[str, float] | None = None,
    samples: tuple[SampleInfo, ...] = SAMPLES,
    order: Any = None,
    **algo: Any,
) -> ScoredBatch:
    """The samples with these scores."""
    by_name = found if isinstance(found, dict) else {"reward_model": found}
    scores = {name: np.float32(values) for name, values in by_name.items()}
    likeliest = None
    if greedy is not None:
        of_prompts = [sample(prompt, 0, 0, row) for row, prompt in enumerate(greedy)]
        likeliest = ScoredSamples(samples=of_prompts, scores={"reward_model": np.float32(list(greedy.values()))})
    return score_batch(
        samples,
        ScoredSamples(samples=samples, scores=scores),
        likeliest,
        reward_weights(reward or Reward()),
        Algo.model_validate(algo),
        order=order,
    )


def advantages(batch: ScoredBatch) -> list[float]:
    assert batch.samples.sequence_advantages is not None
    return batch.samples.sequence_advantages.tolist()


def test_a_rank_gets_the_rows_of_its_chunks() -> None:
    rows = scored_batch(VALUES.tolist(), advantage="rloo", scores={"missing_end": "mask"}).samples
    own = rows.only([2, 0])
    assert (own.chunks.tolist(), own.scores.tolist(), own.groups.tolist()) == ([2, 0, 0], [5, 1, 2], [2, 0, 1])
    assert own.sequence_advantages is not None
    assert own.sequence_advantages.tolist() == [0, -2, -2]
    assert rows.only([1]).actor_mask.tolist() == [False, True]
    assert rows.only([]).scores.tolist() == []


def test_scores_are_in_sample_order() -> None:
    model = Answered({0: np.float32([0, 1]), 2: np.float32([math.inf])}, None, {1: np.float32([2, 3])})
    config: Any = debug()
    reward: Any = SimpleNamespace(layout=config.layout("reward"), dispatch=lambda *_: model)
    found: Any = {
        1: {"f": np.float32([30, 40]), "g": np.float32([0, 1])},
        0: {"f": np.float32([10, 20]), "g": np.float32([1, 0])},
        2: {"f": np.float32([NONE]), "g": np.float32([1])},
    }
    rules: Any = SimpleNamespace(score=lambda *_: Answered(), gather=lambda _: answer(found))
    engines: Any = None
    scorer = Scorer(config, {"reward": reward}, rules, engines)
    scorer._scale = ScoreScale(mean=1.0, std=2.0)
    functions = [RewardFunction(name="here:f"), RewardFunction(name="here:g")]
    rollouts = Rollouts(samples=SAMPLES, chunks=ChunkRefs({}))
    scored = run(scorer.score(rollouts, {}, functions))
    assert {name: values.tolist() for name, values in scored.scores.items()} == {
        "reward_model": pytest.approx([-0.5, 0, 0.5, 1, NONE], nan_ok=True),
        "f": pytest.approx([10, 20, 30, 40, NONE], nan_ok=True),
        "g": [1, 0, 0, 1, 1],
    }
    assert unscored_metrics(scored.scores) == {
        "rewards/unscored": 1,
        "rewards/unscored/reward_model": 1,
        "rewards/unscored/f": 1,
        "rewards/unscored/g": 0,
    }
    assert {values.dtype.name for values in scored.scores.values()} == {"float32"}
    assert scored.seconds == 2.0


@pytest.mark.parametrize("dense", [False, True])
def test_rewards_get_truncated_responses_and_the_reward_model_may_get_full_ones(dense: bool) -> None:
    refs: Any = {"whole": "whole", "cut": "cut"}
    whole = Rollouts(samples=SAMPLES, chunks=refs["whole"])
    cut = Rollouts(samples=(sample("b", 0, 0, 0, finished=False),), chunks=refs["cut"])
    asked: list[Any] = []

    def dispatch(method: Any, request: Any) -> Any:
        asked.append((method, request.schedule.ranks[0].total_rows, request.chunks))
        scores = {index: np.float32([7] * rows) for index, rows in ROWS.items()} if dense else {0: np.float32([7])}
        return Answered(scores, chunks=f"columns of {request.chunks}")

    async def truncate(rollouts: Rollouts, token: int, after: int) -> Rollouts:
        assert (rollouts, token, after) == (whole, 13, 2)
        return cut

    config: Any = debug(*(["reward.dense=scores", "reward.weight=3.0"] if dense else []))
    model: Any = SimpleNamespace(layout=config.layout("reward"), dispatch=dispatch, dispatch_by_chunk=dispatch)
    engines: Any = SimpleNamespace(truncate=truncate)
    truncate_at: Any = None if dense else SimpleNamespace(token=13, after=2)
    scorer = Scorer(config, {"reward": model}, None, engines, truncate_at)
    scorer._scale = ScoreScale(mean=1.0, std=2.0)
    scored = run(scorer.score(whole, {}, ()))
    if dense:
        assert (asked, scored.dense) == ([(MegatronWorker.token_scores, 5, "whole")], "columns of whole")
        assert scorer.token_scale == TokenRewardScale(gain=1.5, bias=-1.5, differences=False), "with the weight"
        return
    assert asked == [(MegatronWorker.scores, 1, "cut")]
    assert scored.samples is cut.samples, "finished is what the rewards see"
    assert (scored.dense, scorer.token_scale) == (None, None)
    assert scored.scores["reward_model"].tolist() == [3]


def test_every_reward_has_the_weight_of_its_own_section() -> None:
    judge = JudgeModel(path="judge", devices="7", template="{response}", pattern=r"(\d)", weight=5.0)
    functions = (RewardFunction(name="here:f", weight=2.0), RewardFunction(name="there:f", weight=-1.0))
    reward = Reward(weight=3.0, functions=functions, judge_model=judge)
    weights = reward_weights(reward, EnvironmentSettings(name="here:World", weight=7.0))
    f, other = labels(functions)
    assert weights == {REWARD_MODEL: 3.0, ENVIRONMENT: 7.0, JUDGE_MODEL: 5.0, f: 2.0, other: -1.0}


def test_the_total_is_weighted_then_clipped_and_unfinished_responses_have_a_fixed_score() -> None:
    functions = (RewardFunction(name="here:f", weight=2.0), RewardFunction(name="there:f", weight=-1.0))
    reward = Reward(weight=3.0, functions=functions)
    scores = {"reward_model": VALUES, "f_2": VALUES * 4, "f_1": np.float32([0, 0, 0, 1, -5])}
    assert total_scores(scores, SAMPLES, reward_weights(reward), Scores()).tolist() == [-1, -2, -3, -2, -15]
    shapes = Scores.model_validate({"clip": 2.0, "missing_end": {"name": "replace", "score": -7.0}})
    assert total_scores(scores, SAMPLES, reward_weights(reward), shapes).tolist() == [-1, -2, -7, -2, -2]
    one_sided = Scores.model_validate({"clip": [-2.5, 9], "missing_end": {"name": "subtract", "penalty": 0.5}})
    assert total_scores(scores, SAMPLES, reward_weights(reward), one_sided).tolist() == [-1, -2, -3, -2, -2.5]
    scored_by_token = Reward(weight=3.0, functions=functions, dense="scores")
    assert total_scores(scores, SAMPLES, reward_weights(scored_by_token), Scores()).tolist() == [-4, -8, -12, -14, -30]


def test_a_sample_with_one_failed_source_has_no_score() -> None:
    """Not even the fixed one for unfinished responses."""
    functions = (RewardFunction(name="here:f"),)
    scores = {"reward_model": np.float32([1, NONE, 3, 4, 5]), "f": np.float32([1, 1, NONE, 1, 1])}
    shapes = Scores.model_validate({"clip": 4.5, "missing_end": "zero"})
    found = total_scores(scores, SAMPLES, reward_weights(Reward(functions=functions)), shapes)
    assert found.tolist() == pytest.approx([2, NONE, NONE, 4.5, 4.5], nan_ok=True)


def test_where_nothing_scores_samples_are_trained_on_without_a_total() -> None:
    batch = without_scores(scored_batch([0, 0, 0, 0, NONE], advantage="none"))
    assert np.isnan(batch.totals).all()
    assert (batch.scores_by_reward, list(batch.metrics)) == ({}, ["rewards/unscored", "rewards/unscored/reward_model"])
    assert batch.trained_roles == {"actor", "critic"}
    assert np.isfinite(batch.samples.scores).tolist() == [True] * 4 + [False]


def test_baselines_are_per_prompt() -> None:
    batch = scored_batch([0, 5, 2, 5, 9], advantage="grpo")
    deviation = math.sqrt(2)  # of 0 and 2, with Bessel's correction
    assert advantages(batch) == pytest.approx([-1 / deviation, 0, 1 / deviation, 0, 0], rel=1e-5)
    assert batch.samples.groups.tolist() == [0, 1, 0, 1, 2]
    assert batch.metrics["group/zero_std_fraction"] == pytest.approx(2 / 3)
    assert batch.metrics["group/single"] == 1
    assert batch.metrics["scores/reward_model"] == pytest.approx(4.2)
    assert batch.samples.actor_mask.all()


def test_a_sample_without_a_score_is_in_no_baseline() -> None:
    batch = scored_batch([0, 5, NONE, 1, 9], advantage="rloo")
    assert advantages(batch) == [0, 4, 0, -4, 0]
    assert batch.metrics["rewards/unscored"] == 1
    assert batch.metrics["group/single"] == 2
    assert batch.metrics["group/std_mean"] == pytest.approx(2 / 3)
    nothing = scored_batch([NONE] * 5, advantage="rloo")
    assert advantages(nothing) == [0] * 5
    assert "scores/reward_model" not in nothing.metrics
    assert (batch.trained_roles, nothing.trained_roles) == ({"actor", "critic"}, set())


def test_unfinished_samples_may_count_in_the_baseline_without_being_trained_on() -> None:
    batch = scored_batch([0, 5, 2, 5, 9], advantage="rloo", scores={"missing_end": "mask"})
    assert advantages(batch) == [-2, 0, 2, 0, 0]
    assert batch.samples.actor_mask.tolist() == [True, True, False, True, True]
    assert batch.trained_roles == {"actor", "critic"}
    of_the_unfinished = scored_batch([NONE, NONE, 2, NONE, NONE], advantage="rloo", scores={"missing_end": "mask"})
    assert of_the_unfinished.trained_roles == {"critic"}


def test_remax_subtracts_the_greedy_responses_score_shaped_the_same_way() -> None:
    batch = scored_batch([0, 5, 2, 5, 9], advantage="remax", greedy={"a": 4, "b": 1, "c": 100}, scores={"clip": 6})
    assert advantages(batch) == [-1, 1, 1, 1, 0]
    unknown = scored_batch([0, 5, 2, 5, 9], advantage="remax", greedy={"a": 4, "b": NONE, "c": 0})
    assert advantages(unknown) == [0, 1, 0, 1, 9]


def test_gdpo_normalises_each_source() -> None:
    """Each source's two scores of a prompt are sqrt(1/2) deviations from their mean, whatever their scale."""
    reward = Reward(weight=2.0, functions=(RewardFunction(name="here:f", weight=0.5),))
    scores = {"reward_model": [0.0, 1, 1, 0, 7], "f": [0.0, 300, 100, 900, 7]}
    batch = scored_batch(scores, reward=reward, advantage="gdpo")
    unit = math.sqrt(0.5)
    expected = [-2.5 * unit, (2 - 0.5) * unit, 2.5 * unit, (-2 + 0.5) * unit, 0]
    assert advantages(batch) == pytest.approx(expected, rel=1e-5)


def test_the_shuffled_control_permutes_scores_over_samples() -> None:
    reward, count = Reward(shuffle=True), 100
    samples = tuple(sample(str(index), 0, 0, index) for index in range(count))
    scores = np.arange(count, dtype=np.float32)
    orders = [shuffled_order(count, 3, step) for step in (1, 2, 1)]
    first, second, again = (
        scored_batch(scores.tolist(), reward=reward, samples=samples, order=order).samples.scores for order in orders
    )
    assert first.tolist() == again.tolist()
    assert first.tolist() != second.tolist()
    assert sorted(first) == sorted(second) == scores.tolist()
    assert sum(first == scores) < 10


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({"name": "nonzero_std", "tol": 0.5}, [True, False, True, False, False]),
        ({"name": "open_range", "low": 0, "high": 2}, [True, True, True, True, False]),
    ],
)
def test_a_filter_reads_the_scored_samples_of_a_prompt(chosen: dict[str, Any], expected: list[bool]) -> None:
    keep = sample_filter(reward_weights(Reward()), Algo.model_validate({"filter": chosen}))
    kept, totals = keep({"reward_model": np.float32([0, 1, 2, 1.5, 9])}, SAMPLES)
    assert (kept.tolist(), totals.tolist()) == (expected, [0, 1, 2, 1.5, 9])
    assert not keep({"reward_model": np.float32([NONE] * 5)}, SAMPLES)[0].any()


def test_lengths_and_endings_cover_the_step() -> None:
    samples = (
        sample("a", 0, 0, 0, tokens=4),
        sample("a", 1, 0, 1, tokens=8, finished=False),
        sample("b", 0, 0, 2, tokens=8),
    )
    assert sample_metrics(samples, 8) == pytest.approx(
        {
            "rollout/samples": 3,
            "response_length/mean": 20 / 3,
            "response_length/min": 4,
            "response_length/max": 8,
            "response_length/clip_ratio": 2 / 3,
            "prompt_length/mean": 3,
            "prompt_length/min": 3,
            "prompt_length/max": 3,
            "truncated_fraction": 1 / 3,
            "stop_token_fraction": 2 / 3,
        }
    )


def test_branches_count_as_one_sample() -> None:
    def rows(lengths: dict[str, int], unfinished: tuple[str, ...] = ()) -> list[SampleInfo]:
        return [
            info(
                f"1/{name}",
                name[0],
                row,
                prompt_tokens=7 if "#" in name else 1,
                response_tokens=tokens,
                finished=name not in unfinished,
            )
            for row, (name, tokens) in enumerate(lengths.items())
        ]

    whole = rows({"p/0": 5, "p/1": 2, "q/0": 9, "q/1": 4})
    scores = np.float32([1, 0, 3, 5])
    lengths = {"p/0": 3, "p/0#1": 2, "p/1": 2, "q/0": 4, "q/0#1": 4, "q/0#2": 1, "q/1": 4}
    branched = rows(lengths, unfinished=("p/0", "q/0#1"))
    of = [0, 0, 1, 2, 2, 2, 3]

    def scored(samples: Sequence[SampleInfo], values: np.ndarray, algo: dict[str, Any]) -> ScoredBatch:
        found = ScoredSamples(samples=samples, scores={"reward_model": values})
        order = np.array([1, 0, 3, 2])
        return score_batch(samples, found, None, reward_weights(Reward()), Algo.model_validate(algo), order=order)

    for algo in ({"advantage": "grpo"}, {"advantage": "opo"}, {"advantage": "rloo", "scores": {"missing_end": "mask"}}):
        expected, found = scored(whole, scores, algo), scored(branched, scores, algo)
        assert advantages(found) == [advantages(expected)[index] for index in of]
        assert found.samples.actor_mask.tolist() == expected.samples.actor_mask[of].tolist()
        assert found.totals.tolist() == expected.totals.tolist()
        assert found.metrics == expected.metrics
    assert sample_metrics(branched, 9) == sample_metrics(whole, 9)
    keep = sample_filter(reward_weights(Reward()), Algo.model_validate({"filter": "nonzero_std"}))
    assert keep({"reward_model": np.float32([1, 1, 3, 5])}, whole)[0].tolist() == [False, False, True, True]


def test_conversations_report_their_turns_failures_and_the_metrics_of_their_environment() -> None:
    assert conversation_metrics([sample("a", 0, 0, 0)]) == {}
    outcomes = [
        ConversationOutcome(turns=1, truncated=True, failure=None, metrics={"calls": 1.0}, limit="max_turns"),
        ConversationOutcome(turns=4, truncated=False, failure=None, metrics={"calls": 4.0, "won": 1.0}),
        ConversationOutcome(turns=1, truncated=False, failure="it hangs", metrics={}),
    ]
    samples = [replace(sample("a", row, 0, row), outcome=outcome) for row, outcome in enumerate(outcomes)]
    samples.append(replace(samples[1], sample_id=f"{samples[1].sample_id}#1"))  # a branch
    expected = {
        "environment/calls": 2.5,
        "environment/won": 1,
        "environment/turns/mean": 2,
        "environment/turns/max": 4,
        "environment/failed": 1,
        "environment/truncated": 1 / 3,
        "environment/truncated/max_turns": 1 / 3,
    }
    assert conversation_metrics(samples) == pytest.approx(expected)
    assert "response_length/clip_ratio" not in sample_metrics(samples, 8)


SCORES = [0.1, 0.9, NONE, 0.2, 0.5, 0.4, 0.9, 0.7]
FINISHED = [True, False, True, True, True, True, True, True]


def chosen(selection: Selection, scores: Sequence[float] = SCORES, prompts: str = "aaaabbbb") -> list[int]:
    pairs = enumerate(zip(prompts, FINISHED, strict=True))
    samples = [sample(prompt, row, 0, row, finished=finished) for row, (prompt, finished) in pairs]
    batch = scored_batch(list(scores), samples=tuple(samples))
    return list(with_selection(batch, samples, selection, 4).selected)


def test_the_best_of_each_draw_of_a_prompt_is_selected() -> None:
    assert chosen(Selection()) == chosen(Selection(), prompts="aaaaaaaa") == [1, 6]
    assert chosen(Selection(discard_unfinished=True)) == [3, 6]
    assert chosen(Selection(min_score=0.3, discard_unfinished=True)) == [6]
    assert chosen(Selection(min_score=2.0)) == chosen(Selection(), scores=[NONE] * 8) == []


def test_the_best_of_the_step_are_selected() -> None:
    def top(fraction: float, **options: Any) -> Selection:
        return Selection.model_validate({"by": {"name": "top", "fraction": fraction}, **options})

    assert chosen(top(0.5)) == [6, 1, 7, 4], "of equals the later first"
    assert chosen(top(0.3, discard_unfinished=True)) == [6, 7]
    assert chosen(top(0.9, min_score=0.5)) == [6, 1, 7, 4], "the least score is enough"
    assert chosen(top(0.9)) == [6, 1, 7, 4, 5, 3, 0], "samples without a score are never selected"


def test_all_branches_of_a_selected_conversation_are_trained_on() -> None:
    names = ("1/p/0", "1/p/0#1", "1/p/1", "1/q/0", "1/q/1")
    samples = [replace(sample(name[2], row, 0, row), sample_id=name) for row, name in enumerate(names)]
    found = ScoredSamples(samples=samples, scores={"reward_model": np.float32([1, 0, 2, 5])})
    batch = score_batch(samples, found, None, reward_weights(Reward()), Algo(), order=None)
    selected = with_selection(batch, samples, Selection(), 2)
    assert selected.selected == [0, 1, 4]
    assert (selected.metrics["select/samples"], selected.metrics["select/score"]) == (2, 3.0)


def test_roles_without_a_selected_sample_are_not_trained() -> None:
    batch = scored_batch(VALUES.tolist(), advantage="rloo", scores={"missing_end": "mask"})
    assert replace(batch, selected=[1, 2]).trained_roles == {"actor", "critic"}
    assert replace(batch, selected=[2]).trained_roles == {"critic"}, "it is unfinished"
    assert replace(batch, selected=[]).trained_roles == set()
