"""The experience of a step in one process: rewards, penalties, values and advantages, against naive loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megarl.config.schema import Algo, ValueNorm
from megarl.experience.build import build_experience
from megarl.experience.padded_batch import Columns
from megarl.experience.records import ExperienceChunk, ExperienceReport, StepContext, TokenRewardScale
from megarl.types import Ragged, RolloutChunk
from tests.megatron.samples import alone, columns_of, conversations, random_chunks
from tests.oracle import advantages, comparisons, normalisation

CHUNKS, INFOS = random_chunks()
ROWS = [(chunk, row) for chunk in range(4) for row in range(3)]
TOKENS = sum(info.response_tokens for info in INFOS)
TERMS = StepContext(kl_coef=0.5, version=0, groups=4)
Built = tuple[dict[int, ExperienceChunk], ExperienceReport]


def column(seed: int, scale: float = 1.0, more: int = 0) -> dict[int, Ragged]:
    """A random number for every response token, and some more of each response."""
    random = np.random.default_rng(seed)
    return {
        i: Ragged.from_rows([scale * random.normal(size=n + more) for n in chunk.response_ids.lengths], np.float32)
        for i, chunk in enumerate(CHUNKS)
    }


def plus(one: dict[int, Ragged], other: dict[int, Ragged]) -> dict[int, Ragged]:
    return {i: Ragged(values=one[i].values + other[i].values, offsets=one[i].offsets) for i in one}


OLD, VALUES = column(0), column(2)
REF = plus(OLD, column(1, scale=0.3))
SCORES = {i: np.arange(3, dtype=np.float32) + i for i in range(4)}
OUTCOMES = {i: np.array([-1.0, 0.0, 2.0], np.float32) * i for i in range(4)}


def build(
    algo: dict[str, Any] | None = None,
    columns: Columns | None = None,
    terms: StepContext = TERMS,
    value_norm: ValueNorm | None = None,
    rollouts: list[RolloutChunk] = CHUNKS,
) -> Built:
    given = columns or columns_of(SCORES, old=OLD, ref=REF, values=VALUES)
    settings = Algo.model_validate({"advantage": "gae", **(algo or {})})
    return build_experience(list(range(4)), rollouts, given, settings, value_norm, terms, alone, alone)


def flat(columns: Any) -> np.ndarray:
    return np.concatenate([columns[i].values for i in range(4)]).astype(np.float64)


def of(built: Built, name: str) -> dict[int, Ragged]:
    return {i: getattr(chunk, name) for i, chunk in built[0].items()}


def close(found: dict[int, Ragged], expected: Callable[[int, int], Any]) -> None:
    """Compares every row with a function of its chunk and row number."""
    for chunk, row in ROWS:
        want = np.broadcast_to(expected(chunk, row), found[chunk][row].shape)
        np.testing.assert_allclose(found[chunk][row], want, rtol=1e-5, atol=1e-5, err_msg=f"{chunk}, {row}")


def gap(chunk: int, row: int) -> np.ndarray:
    return OLD[chunk][row].astype(np.float64) - REF[chunk][row]


def rewards(chunk: int, row: int, kl: Callable[[np.ndarray], np.ndarray] = lambda d: d) -> np.ndarray:
    """The penalty of each token, and the score on the last."""
    of_tokens = -0.5 * kl(gap(chunk, row))
    of_tokens[-1] += SCORES[chunk][row]
    return of_tokens


IN_REWARD = {"kl": {"coef": 0.1}, "normalise": {"advantages": "none"}}


def test_the_rewards_of_turns_are_at_their_last_tokens() -> None:
    ends = [[sorted({1, len(row) // 2 + 1, len(row)}) for row in chunk.rollout_logprobs] for chunk in CHUNKS]
    given = [[[0.5 * end - 1 for end in row] for row in rows] for rows in ends]
    of_turns = [
        replace(chunk, turns=Ragged.from_rows(ends[i], np.int32), turn_rewards=Ragged.from_rows(given[i], np.float64))
        for i, chunk in enumerate(CHUNKS)
    ]
    algo = {"normalise": {"advantages": "none"}, "advantage": {"name": "gae", "gamma": 0.9, "lam": 0.8}}
    columns = columns_of(SCORES, old=OLD, ref=REF, values=VALUES)
    built = build({**algo, "kl": {"coef": 0.1}}, columns, replace(TERMS, turn_rewards=2.0), rollouts=of_turns)

    def expected(chunk: int, row: int) -> Any:
        total = rewards(chunk, row)
        for end, reward in zip(ends[chunk][row], given[chunk][row], strict=True):
            total[end - 1] += 2.0 * reward
        return advantages.gae(total, VALUES[chunk][row], gamma=0.9, lam=0.8)[0]

    close(of(built, "advantages"), expected)
    mean = np.mean([SCORES[chunk][row] + 2 * sum(given[chunk][row]) for chunk, row in ROWS])
    assert built[1].metrics["objective/score"] == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize(
    ("estimator", "estimate"),
    [
        ("k1", lambda d: d),
        ("k2", lambda d: d**2 / 2),
        ("k3", lambda d: np.exp(-d) - 1 + d),
        ("abs", np.abs),
    ],
)
def test_the_kl_penalty_uses_the_configured_estimator_and_the_steps_coefficient(
    estimator: Any, estimate: Callable[[np.ndarray], np.ndarray]
) -> None:
    algo = {"kl": {"estimator": estimator, "coef": 0.1}, "normalise": {"advantages": "none"}}
    built = build({**algo, "advantage": {"name": "gae", "gamma": 0.9, "lam": 0.8}})

    def expected(chunk: int, row: int) -> tuple[Any, Any]:
        return advantages.gae(rewards(chunk, row, estimate), VALUES[chunk][row], gamma=0.9, lam=0.8)

    close(of(built, "advantages"), lambda chunk, row: expected(chunk, row)[0])
    close(of(built, "returns"), lambda chunk, row: expected(chunk, row)[1])
    assert all(chunk.ref_logprobs is None for chunk in built[0].values()), "the loss has no penalty of its own"
    assert all(chunk.old_values is VALUES[i] for i, chunk in built[0].items())
    metrics = built[1].metrics
    penalty = -0.5 * sum(estimate(gap(*where)).sum() for where in ROWS) / 12
    assert metrics["objective/kl_coef"] == 0.5
    assert metrics["objective/non_score_reward"] == pytest.approx(penalty, rel=1e-5)
    assert metrics["objective/rlhf_reward"] == pytest.approx(2.5 + penalty, rel=1e-5)
    assert metrics["objective/score"] == pytest.approx(2.5)
    assert metrics["objective/kl"] == pytest.approx(sum(gap(*where).sum() for where in ROWS) / 12, rel=1e-5)
    assert metrics["objective/entropy"] == pytest.approx(-flat(OLD).sum() / 12, rel=1e-5)


def test_a_kl_penalty_in_the_loss_is_not_in_the_rewards() -> None:
    in_loss = build({"kl": {"in": "loss", "estimator": "k3", "coef": 0.1}})
    without = build(columns=columns_of(SCORES, old=OLD, values=VALUES))
    assert in_loss[1].metrics["objective/non_score_reward"] == 0.0
    assert in_loss[1].metrics["objective/kl"] != 0.0
    assert not without[1].metrics.keys() & {"objective/kl", "objective/kl_per_token", "objective/kl_token_mean"}
    assert without[1].metrics["objective/entropy"] == in_loss[1].metrics["objective/entropy"]
    for i in range(4):
        assert in_loss[0][i].ref_logprobs is REF[i]
        assert np.array_equal(in_loss[0][i].advantages.values, without[0][i].advantages.values)


def test_advantages_are_whitened_and_returns_are_not() -> None:
    built = build(columns=columns_of(SCORES, old=OLD, values=VALUES))
    naive = [advantages.gae([0.0] * (len(VALUES[c][r]) - 1) + [SCORES[c][r]], VALUES[c][r]) for c, r in ROWS]
    white = dict(zip(ROWS, normalisation.whiten([own for own, _ in naive]), strict=True))
    close(of(built, "advantages"), lambda chunk, row: white[chunk, row])
    raw = np.concatenate([own for own, _ in naive])
    returns = np.concatenate([own for _, own in naive])
    metrics = built[1].metrics
    found = [metrics[f"advantages/{kind}"] for kind in ("mean", "min", "max")]
    assert found == pytest.approx([raw.mean(), raw.min(), raw.max()], abs=1e-5), "before whitening"
    assert (metrics["rewards/mean"], metrics["rewards/min"], metrics["rewards/max"]) == pytest.approx((2.5, 0, 5))
    assert metrics["returns/mean"] == pytest.approx(returns.mean(), rel=1e-4)
    errors = returns - flat(VALUES)
    assert metrics["value/explained_variance"] == pytest.approx(1 - errors.var() / returns.var(), abs=1e-4)


def test_rewards_are_scaled_before_advantage_estimation() -> None:
    algo = {**IN_REWARD, "normalise": {"advantages": "none", "rewards": True}, "advantage": "reinforce"}
    built = build(algo, columns_of(SCORES, old=OLD, ref=REF))
    scaled = dict(zip(ROWS, normalisation.whiten([rewards(*where) for where in ROWS], keep_mean=True), strict=True))
    close(of(built, "advantages"), lambda chunk, row: np.cumsum(scaled[chunk, row][::-1])[::-1])
    assert all(chunk.returns is None for chunk in built[0].values()), "there is no critic to learn them"


def test_the_score_may_be_placed_on_every_token() -> None:
    algo = {"advantage": "reinforce", "scores": {"placement": "every_valid"}}
    built = build(algo, columns_of(SCORES, old=OLD))
    close(of(built, "advantages"), lambda chunk, row: SCORES[chunk][row] * np.arange(len(OLD[chunk][row]), 0, -1))
    assert built[1].metrics["objective/score"] == pytest.approx(2.5)


@pytest.mark.parametrize("cumulative", [True, False])
def test_a_sequence_advantage_is_broadcast_to_tokens_plus_penalties(cumulative: bool) -> None:
    algo = {"advantage": "rloo", "kl": {"coef": 0.1, "cumulative": cumulative}}
    built = build(algo, columns_of(SCORES, old=OLD, ref=REF, outcomes=OUTCOMES))

    def expected(chunk: int, row: int) -> list[float]:
        return comparisons.reward_to_go_of(
            float(OUTCOMES[chunk][row]), list(-0.5 * gap(chunk, row)), cumulative=cumulative
        )

    close(of(built, "advantages"), expected)
    assert all(chunk.old_values is chunk.returns is chunk.weights is None for chunk in built[0].values())
    assert not [name for name in built[1].metrics if name.startswith(("value/", "returns/"))]
    assert built[1].metrics["objective/score"] == pytest.approx(2.5), "the score, not what the comparison made of it"


@pytest.mark.parametrize(
    ("normaliser", "naive"),
    [
        ({"name": "grouped_tokens", "eps": 1e-3}, lambda rows, of: normalisation.grouped_tokens(rows, of, eps=1e-3)),
        (
            {"name": "levels", "mean": "group", "std": "batch"},
            lambda rows, of: normalisation.levels(rows, of, mean="group", std="batch"),
        ),
        (
            {"name": "whiten", "form": "std_plus_eps", "ddof": 1},
            lambda rows, of: normalisation.whiten(rows, of, form="std_plus_eps", ddof=1),
        ),
    ],
)
def test_advantages_are_normalised_per_prompt_or_per_step(normaliser: dict[str, Any], naive: Any) -> None:
    algo = {"advantage": "reinforce", "normalise": {"advantages": normaliser}, "kl": {"coef": 0.1}}
    built = build(algo, columns_of(SCORES, old=OLD, ref=REF))
    raw = [np.cumsum(rewards(*where)[::-1])[::-1].tolist() for where in ROWS]
    expected = dict(zip(ROWS, naive(raw, [chunk for chunk, _ in ROWS]), strict=True))
    close(of(built, "advantages"), lambda chunk, row: expected[chunk, row])


def sides(raw: dict[int, Ragged]) -> dict[int, Ragged]:
    """The scores before each token, then those after it."""
    return {i: Ragged.from_rows([[*row[:-1], *row[1:]] for row in own], np.float32) for i, own in raw.items()}


@pytest.mark.parametrize("differences", [False, True])
def test_dense_scores_are_token_rewards(differences: bool) -> None:
    """A reward model's score 2 * raw + 1, clipped to [-1, 1.5], beside a rule's sequence score."""
    raw = column(5, more=1)
    algo = {"advantage": "reinforce", "scores": {"clip": [-1.0, 1.5]}}
    terms = replace(TERMS, dense=TokenRewardScale(gain=2.0, bias=1.0, differences=differences))
    built = build(algo, columns_of(SCORES, old=OLD, dense=sides(raw)), terms)

    def earned(chunk: int, row: int) -> np.ndarray:
        worth = np.clip(2.0 * raw[chunk][row].astype(np.float64) + 1.0, -1.0, 1.5)
        of_tokens = np.diff(worth) if differences else worth[1:].copy()
        of_tokens[-1] += SCORES[chunk][row]
        return of_tokens

    close(of(built, "advantages"), lambda chunk, row: np.cumsum(earned(chunk, row)[::-1])[::-1])
    total = sum(earned(*where).sum() for where in ROWS) / 12
    assert built[1].metrics["objective/score"] == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("differences", [False, True])
def test_given_tokens_change_nothing_in_the_experience(differences: bool) -> None:
    """All columns are of the sampled tokens; of a reward model, its scores before and after each of them."""
    algo = {"kl": {"coef": 0.1}, "normalise": {"rewards": True}}
    terms = replace(TERMS, dense=TokenRewardScale(gain=2.0, bias=1.0, differences=differences))
    talks = conversations(CHUNKS)
    columns = columns_of(SCORES, old=OLD, ref=REF, values=VALUES, dense=sides(column(5, more=1)))
    found, report = build(algo, columns, terms, rollouts=talks)
    chunks, whole = build(algo, columns, terms)
    assert report == whole
    for i, chunk in chunks.items():
        assert found[i].loss_mask is talks[i].loss_mask
        assert found[i].response_ids is talks[i].response_ids
        for name in ("advantages", "returns"):
            ours, theirs = getattr(found[i], name), getattr(chunk, name)
            assert ours.values.tobytes() == theirs.values.tobytes()
            assert ours.offsets.tolist() == theirs.offsets.tolist()
        assert chunk.loss_mask is None


@pytest.mark.parametrize("turns", [False, True])
def test_the_branches_of_a_conversation_are_one_response(turns: bool) -> None:
    """The first two rows of each chunk are; with rewards of turns, the first one has those of the second."""
    talks = [replace(chunk, sample_ids=(f"{i}", f"{i}#1", f"{i}/other")) for i, chunk in enumerate(CHUNKS)]
    scores = {i: own[[1, 1, 2]] for i, own in SCORES.items()}
    if turns:
        ends = [[[len(row)] for row in chunk.rollout_logprobs] for chunk in CHUNKS]
        told = Ragged.from_rows([[2.0], [1.0], [0.0]], np.float64)
        talks = [
            replace(talk, turns=Ragged.from_rows(own, np.int32), turn_rewards=told)
            for talk, own in zip(talks, ends, strict=True)
        ]
    terms = replace(TERMS, turn_rewards=2.0 if turns else None)
    metrics = build(IN_REWARD, columns_of(scores, old=OLD, ref=REF, values=VALUES), terms, rollouts=talks)[1].metrics
    of_talks = [gap(i, 2) for i in range(4)] + [np.concatenate([gap(i, 0), gap(i, 1)]) for i in range(4)]
    expected = [score for i in range(4) for score in (SCORES[i][1] + 6.0 * turns, SCORES[i][2])]
    assert metrics["objective/score"] == pytest.approx(np.mean(expected), rel=1e-5)
    assert metrics["objective/kl"] == pytest.approx(np.mean([own.sum() for own in of_talks]), rel=1e-5)
    assert metrics["objective/kl_token_mean"] == pytest.approx(np.mean([own.mean() for own in of_talks]), rel=1e-5)
    assert metrics["objective/entropy"] == pytest.approx(-flat(OLD).sum() / 8, rel=1e-5)
    penalty = -0.5 * sum(own.sum() for own in of_talks) / 8
    assert metrics["objective/non_score_reward"] == pytest.approx(penalty, rel=1e-5)


def test_a_sample_without_a_score_is_excluded_from_statistics_and_training() -> None:
    """As if it were absent."""
    scores = {i: own.copy() for i, own in SCORES.items()}
    scores[1][2] = math.nan
    unscored, whole = build(IN_REWARD, columns_of(scores, old=OLD, ref=REF, values=VALUES)), build(IN_REWARD)
    white = build({"kl": {"coef": 0.1}}, columns_of(scores, old=OLD, ref=REF, values=VALUES))
    others = [where for where in ROWS if where != (1, 2)]
    raw = {where: of(whole, "advantages")[where[0]][where[1]].astype(np.float64) for where in others}
    normalised = dict(zip(others, normalisation.whiten(list(raw.values())), strict=True))
    for built, expected in ((unscored, raw), (white, normalised)):
        close(of(built, "advantages"), lambda chunk, row, own=expected: own.get((chunk, row), 0.0))
        close(of(built, "actor_mask"), lambda chunk, row: float((chunk, row) != (1, 2)))
        close(of(built, "scored_mask"), lambda chunk, row: float((chunk, row) != (1, 2)))
    assert all(chunk.weights is chunk.actor_mask is chunk.scored_mask is None for chunk in whole[0].values())
    metrics = unscored[1].metrics
    assert metrics["objective/score"] == pytest.approx(sum(SCORES[c][r] for c, r in others) / 11)
    assert metrics["objective/kl"] == pytest.approx(sum(gap(*where).sum() for where in others) / 11, rel=1e-5)


def test_a_step_without_scores_gives_zero_advantages() -> None:
    scores = {i: np.full(3, math.nan, np.float32) for i in range(4)}
    chunks, report = build(columns=columns_of(scores, old=OLD, ref=REF, values=VALUES))
    for chunk in chunks.values():
        assert not chunk.advantages.values.any()
        assert chunk.actor_mask is not None
        assert not chunk.actor_mask.values.any()
    assert all(math.isfinite(value) for value in report.metrics.values())
    measured = {name for name in report.metrics if name.startswith(("objective/", "value/", "returns/", "rewards/"))}
    assert measured == {"objective/kl_coef"}, "the others would be means over nothing"


def test_samples_may_count_in_the_baseline_without_being_trained_on() -> None:
    masked = frozenset({(0, 1), (3, 0)})
    built = build(IN_REWARD, columns_of(SCORES, old=OLD, ref=REF, values=VALUES, untrained=masked))
    close(of(built, "actor_mask"), lambda chunk, row: float((chunk, row) not in masked))
    assert all(chunk.scored_mask is None for chunk in built[0].values()), "the critic learns from all"
    for i in range(4):
        assert np.array_equal(built[0][i].advantages.values, build(IN_REWARD)[0][i].advantages.values)


def test_the_critic_predicts_and_learns_normalised_returns() -> None:
    """Moments of mean 3 and deviation 2 so far; the new ones know the step's returns."""
    given = {"mean": 0.3 * 3.0, "square": 0.3 * (9.0 + 4.0), "weight": 0.3}
    norm = ValueNorm(beta=0.5)
    built = build(IN_REWARD, terms=replace(TERMS, value_norm=given), value_norm=norm)

    def raw(chunk: int, row: int) -> tuple[Any, Any]:
        return advantages.gae(rewards(chunk, row), 2.0 * VALUES[chunk][row] + 3.0)

    close(of(built, "advantages"), lambda chunk, row: raw(chunk, row)[0])
    returns = np.concatenate([raw(*where)[1] for where in ROWS])
    weight = 0.5 * 0.3 + 0.5
    mean = (0.5 * given["mean"] + 0.5 * returns.mean()) / weight
    deviation = math.sqrt((0.5 * given["square"] + 0.5 * np.square(returns).mean()) / weight - mean**2)
    close(of(built, "returns"), lambda chunk, row: np.clip((np.array(raw(chunk, row)[1]) - mean) / deviation, -5, 5))
    assert built[1].value_norm == pytest.approx(
        {"mean": mean * weight, "square": (deviation**2 + mean**2) * weight, "weight": weight}
    )
    assert built[0][2].old_values is VALUES[2], "as the critic said them"
    assert built[1].metrics["returns/mean"] == pytest.approx(returns.mean(), rel=1e-5), "in units of reward"


HERE = "tests.own_functions"
KL = {"in": "reward", "coef": 0.1}


@pytest.mark.parametrize(
    ("own", "ours"),
    [
        (
            {"advantage": {"name": f"{HERE}:same_gae", "level": "token", "args": {"lam": 0.7}}},
            {"advantage": {"name": "gae", "lam": 0.7}, "normalise": {"advantages": "none"}},
        ),
        (
            {"normalise": {"advantages": f"{HERE}:same_levels"}},
            {"normalise": {"advantages": {"name": "levels", "std": "group"}}},
        ),
        ({"kl": {**KL, "estimator": f"{HERE}:same_k2"}}, {"kl": {**KL, "estimator": "k2"}}),
        (
            {"correction": {"weights": {"name": f"{HERE}:same_truncation", "args": {"upper": 1.1}}}},
            {"correction": {"weights": {"name": "token_truncate", "upper": 1.1}}},
        ),
    ],
    ids=["advantage", "normaliser", "estimator", "weights"],
)
def test_custom_functions_give_the_same_experience(own: dict[str, Any], ours: dict[str, Any]) -> None:
    one, other, plain = (build(algo)[0] for algo in (own, ours, {}))
    for name in ("advantages", "returns", "weights"):
        for i, chunk in one.items():
            mine, theirs = getattr(chunk, name), getattr(other[i], name)
            assert (mine is None) == (theirs is None)
            if mine is not None:
                assert np.array_equal(mine.values, theirs.values)
    told = [(chunk.advantages.values.tolist(), chunk.weights is None) for chunk in one.values()]
    assert told != [(chunk.advantages.values.tolist(), chunk.weights is None) for chunk in plain.values()]
