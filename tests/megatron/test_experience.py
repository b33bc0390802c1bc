"""The experience of a step in one process: which columns it has, and what the metrics say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from megarl.config.schema import KL, Algo
from megarl.megatron.experience import Columns, build_experience
from megarl.types import ExperienceChunk, Ragged
from tests.megatron.samples import random_chunks

CHUNKS, INFOS = random_chunks()
SAMPLES, TOKENS = len(INFOS), sum(info.response_tokens for info in INFOS)
Built = tuple[dict[int, ExperienceChunk], dict[str, float]]


def column(seed: int, scale: float = 1.0) -> dict[int, Ragged]:
    """A random number for every response token."""
    random = np.random.default_rng(seed)

    def of(chunk: Any) -> Ragged:
        offsets = chunk.response_ids.offsets
        return Ragged(values=(scale * random.normal(size=offsets[-1])).astype(np.float32), offsets=offsets)

    return {i: of(chunk) for i, chunk in enumerate(CHUNKS)}


OLD, VALUES = column(0), column(2)
REF = {
    i: Ragged(values=OLD[i].values + noise.values, offsets=noise.offsets) for i, noise in column(1, scale=0.3).items()
}
SCORES = {i: np.arange(3, dtype=np.float32) + i for i in range(4)}
OUTCOMES = {i: np.array([-1.0, 0.0, 2.0], np.float32) * i for i in range(4)}


def build(algo: Algo, *, ref: bool = True, outcomes: bool = False, kl_coef: float = 0.5) -> Built:
    columns = Columns(
        old_logprobs=OLD,
        ref_logprobs=REF if ref else None,
        values=None if outcomes else VALUES,
        scores=SCORES,
        outcomes=OUTCOMES if outcomes else None,
    )
    return build_experience(list(range(4)), CHUNKS, columns, algo, lambda vector: vector, kl_coef=kl_coef)


def flat(columns: dict[int, Ragged]) -> np.ndarray:
    return np.concatenate([columns[i].values for i in range(4)]).astype(np.float64)


def gaps() -> np.ndarray:
    return flat(OLD) - flat(REF)


def in_loss(estimator: str = "k3") -> KL:
    return KL.model_validate({"in": "loss", "estimator": estimator, "coef": 0.1})


@pytest.mark.parametrize(
    ("estimator", "estimate"),
    [("k1", lambda d: d), ("k2", lambda d: d**2 / 2), ("k3", lambda d: np.exp(-d) - 1 + d)],
)
def test_the_penalty_is_that_of_its_estimator_and_the_coefficient_that_of_the_step(
    estimator: Any, estimate: Callable[[np.ndarray], np.ndarray]
) -> None:
    _, metrics = build(Algo(kl=KL(estimator=estimator, coef=0.1)), kl_coef=0.5)
    penalty = -0.5 * estimate(gaps()).sum() / SAMPLES
    assert metrics["objective/kl_coef"] == 0.5
    assert metrics["objective/non_score_reward"] == pytest.approx(penalty, rel=1e-5)
    assert metrics["objective/rlhf_reward"] == pytest.approx(2.5 + penalty, rel=1e-5)
    assert metrics["objective/score"] == pytest.approx(2.5)
    assert metrics["objective/kl"] == pytest.approx(gaps().sum() / SAMPLES, rel=1e-5), "whatever the estimator"
    assert metrics["objective/kl_per_token"] == pytest.approx(gaps().sum() / TOKENS, rel=1e-5)
    assert metrics["objective/entropy"] == pytest.approx(-flat(OLD).sum() / SAMPLES, rel=1e-5)


def test_a_reward_with_a_penalty_has_no_penalty_in_the_loss() -> None:
    experience, _ = build(Algo(kl=KL(coef=0.1), lam=1.0, gamma=1.0, whiten_advantages=False), kl_coef=0.5)
    assert all(chunk.ref_logprobs is None for chunk in experience.values())
    for i, chunk in experience.items():
        assert chunk.returns is not None
        assert chunk.old_values is VALUES[i]
        for row in range(3):
            d = OLD[i][row].astype(np.float64) - REF[i][row]
            expected = SCORES[i][row] - 0.5 * d[::-1].cumsum()[::-1]
            np.testing.assert_allclose(chunk.returns[row], expected, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(chunk.advantages[row], expected - VALUES[i][row], rtol=1e-5, atol=1e-5)


def test_a_penalty_in_the_loss_is_not_in_the_rewards() -> None:
    with_penalty, metrics = build(Algo(kl=in_loss()))
    without, plain = build(Algo(), ref=False)
    assert metrics["objective/non_score_reward"] == plain["objective/non_score_reward"] == 0.0
    assert metrics["objective/kl"] != 0.0
    assert plain["objective/kl"] == 0.0
    for i in range(4):
        assert with_penalty[i].ref_logprobs is REF[i]
        assert np.array_equal(with_penalty[i].advantages.values, without[i].advantages.values)


def test_advantages_are_white_and_returns_are_not() -> None:
    experience, metrics = build(Algo())
    advantages = flat({i: chunk.advantages for i, chunk in experience.items()})
    assert advantages.mean() == pytest.approx(0, abs=1e-6)
    assert advantages.var() == pytest.approx(1, abs=1e-5)
    returns = np.concatenate([chunk.returns.values for chunk in experience.values() if chunk.returns is not None])
    assert metrics["returns/mean"] == pytest.approx(returns.mean(), rel=1e-5)
    errors = returns - flat(VALUES)
    assert metrics["value/explained_variance"] == pytest.approx(1 - errors.var() / returns.var(), abs=1e-4)


def test_an_outcome_is_the_advantage_of_each_token_and_nothing_has_a_value() -> None:
    experience, metrics = build(Algo(advantage="grpo", kl=in_loss()), outcomes=True)
    assert not [name for name in metrics if name.startswith(("value/", "returns/"))]
    for i, chunk in experience.items():
        assert chunk.old_values is None
        assert chunk.returns is None
        for row in range(3):
            assert set(chunk.advantages[row].tolist()) == {OUTCOMES[i][row]}


def test_a_rank_without_chunks_takes_part() -> None:
    sizes: list[int] = []

    def reduce(vector: Any) -> Any:
        sizes.append(len(vector))
        return vector

    columns = Columns(old_logprobs=OLD, ref_logprobs=REF, values=VALUES, scores=SCORES, outcomes=None)
    built, _ = build_experience([], CHUNKS, columns, Algo(), reduce, kl_coef=0.1)
    alone = list(sizes)
    sizes.clear()
    build_experience([0, 1, 2, 3], CHUNKS, columns, Algo(), reduce, kl_coef=0.1)
    assert built == {}
    assert sizes == alone, "every rank calls every reduction"
