"""Off-policy rollouts: correction weights, masks, and the columns that an update gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megarl.config.schema import Algo
from megarl.experience.build import build_experience
from megarl.experience.records import ExperienceChunk, StepContext
from megarl.types import Ragged, VersionSpan
from tests.megatron.samples import alone, columns_of, random_chunks
from tests.oracle import corrections

RANDOM = np.random.default_rng(4)
ROWS = [(chunk, row) for chunk in range(4) for row in range(3)]
VERSION = 9
"""Of the actor before the update."""


def aged(chunk: Any) -> Any:
    """A chunk whose responses begin under one version and end under a later one, with log-probabilities of its own."""
    lengths = chunk.response_ids.lengths
    cuts = [int(RANDOM.integers(n)) for n in lengths]
    return replace(
        chunk,
        rollout_logprobs=Ragged.from_rows([RANDOM.normal(scale=0.5, size=n) for n in lengths], np.float32),
        versions=tuple(
            tuple(
                VersionSpan(start=start, stop=stop, version=version, engine_id=0)
                for start, stop, version in ((0, cut, 6), (cut, int(n), 8))
                if start < stop
            )
            for cut, n in zip(cuts, lengths, strict=True)
        ),
    )


CHUNKS = [aged(chunk) for chunk in random_chunks()[0]]
ROLLOUT = {i: chunk.rollout_logprobs for i, chunk in enumerate(CHUNKS)}
NOISE = {i: RANDOM.normal(scale=0.4, size=len(own.values)) for i, own in ROLLOUT.items()}
OLD = {i: Ragged(values=(own.values + NOISE[i]).astype(np.float32), offsets=own.offsets) for i, own in ROLLOUT.items()}
SCORES = {i: np.arange(3, dtype=np.float32) for i in range(4)}
UNLEARNT = frozenset({(2, 1)})
Built = dict[int, ExperienceChunk]


def build(
    correction: dict[str, Any], *, recomputed: bool = True, max_staleness: int = 0
) -> tuple[Built, dict[str, float]]:
    algo = Algo.model_validate({"advantage": "reinforce", "correction": correction})
    columns = columns_of(SCORES, old=OLD if recomputed else None, untrained=UNLEARNT)
    terms = StepContext(kl_coef=0.0, version=VERSION, max_staleness=max_staleness, groups=4)
    built, report = build_experience(list(range(4)), CHUNKS, columns, algo, None, terms, alone, alone)
    return built, dict(report.metrics)


def pair(chunk: int, row: int) -> tuple[list[float], list[float]]:
    return OLD[chunk][row].tolist(), ROLLOUT[chunk][row].tolist()


def ages(chunk: int, row: int) -> list[int]:
    """How many versions ago each token was sampled."""
    return [VERSION - span.version for span in CHUNKS[chunk].versions[row] for _ in range(span.start, span.stop)]


def weights_are(built: Built, expected: Callable[[int, int], Any], column: str = "weights") -> None:
    for chunk, row in ROWS:
        weights = getattr(built[chunk], column)[row]
        np.testing.assert_allclose(weights, np.broadcast_to(expected(chunk, row), weights.shape), rtol=1e-5, atol=1e-6)


def kept_are(built: Built, expected: Callable[[int, int], Any]) -> None:
    """Checks the actor mask, without samples that are not trained on."""
    weights_are(built, lambda chunk, row: 0.0 if (chunk, row) in UNLEARNT else expected(chunk, row), "actor_mask")


@pytest.mark.parametrize(
    "name",
    ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_truncate", "geometric_mask"],
)
def test_correction_weights_follow_their_level_and_rule(name: str) -> None:
    built, metrics = build({"weights": {"name": name, "upper": 1.4, "lower": 0.7}})
    naive = getattr(corrections, name)
    weights_are(built, lambda chunk, row: naive(*pair(chunk, row), upper=1.4, lower=0.7))
    kept_are(built, lambda _chunk, _row: 1.0)
    all_weights = np.concatenate([naive(*pair(*where), upper=1.4, lower=0.7) for where in ROWS])
    assert metrics["rollout_corr/weight_mean"] == pytest.approx(all_weights.mean(), rel=1e-5)
    assert 0 < metrics["rollout_corr/ess"] < 1


def test_normalized_weights_have_mean_one_over_the_step() -> None:
    built, _ = build({"weights": {"name": "token_truncate", "upper": 1.4, "batch_normalise": True}})
    plain = corrections.normalised([corrections.token_truncate(*pair(*where), upper=1.4) for where in ROWS])
    expected = dict(zip(ROWS, plain, strict=True))
    weights_are(built, lambda chunk, row: expected[chunk, row])


def test_a_token_must_lie_in_every_trust_region() -> None:
    """A bound on tokens and one on sequences, with weights besides."""
    built, metrics = build(
        {
            "weights": {"name": "token_truncate", "upper": 2.0},
            "reject": [
                {"statistic": "token_k1", "lower": 0.6, "upper": 1.5},
                {"statistic": "sequence_mean_k2", "upper": 0.09},
            ],
        }
    )

    def gap(chunk: int, row: int) -> np.ndarray:
        old, rollout = (np.array(own) for own in pair(chunk, row))
        return old - rollout

    def expected(chunk: int, row: int) -> np.ndarray:
        d = gap(chunk, row)
        inside = (np.exp(-d) >= 0.6) & (np.exp(-d) <= 1.5)
        return inside & ((d**2 / 2).mean() <= 0.09)

    kept_are(built, expected)
    weights_are(built, lambda chunk, row: np.minimum(np.exp(gap(chunk, row)), 2.0))
    kept = np.concatenate([expected(*where) for where in ROWS])
    assert 0 < kept.mean() < 1
    assert metrics["rollout_corr/kept_fraction"] == pytest.approx(kept.mean())
    weights = np.concatenate([np.minimum(np.exp(gap(*where)), 2.0) for where in ROWS])
    assert metrics["rollout_corr/weight_mean"] == pytest.approx((weights * kept).mean(), rel=1e-5)


def test_the_second_moment_is_computed_over_the_step() -> None:
    built, _ = build({"m2po": {"threshold": 0.05}})
    differences = [(np.array(pair(*where)[0]) - np.array(pair(*where)[1])).tolist() for where in ROWS]
    kept = dict(zip(ROWS, corrections.second_moment(differences, threshold=0.05), strict=True))
    assert 0 < np.mean([x for own in kept.values() for x in own]) < 1
    kept_are(built, lambda chunk, row: kept[chunk, row])


def test_without_corrections_there_are_no_weights() -> None:
    built, metrics = build({})
    kept_are(built, lambda _chunk, _row: 1.0)
    assert all(chunk.weights is None for chunk in built.values())
    assert "rollout_corr/weight_mean" not in metrics
    d = np.concatenate([OLD[i].values.astype(np.float64) - ROLLOUT[i].values for i in range(4)])
    assert metrics["rollout_corr/kl"] == pytest.approx(-d.mean(), rel=1e-4)
    assert metrics["rollout/logprob_gap"] == pytest.approx(np.abs(d).mean(), rel=1e-5)
    assert all(chunk.rollout_logprobs is chunk.proximal_weights is None for chunk in built.values())


def test_rollout_logprobs_may_replace_old_logprobs() -> None:
    built, metrics = build({"old_logprobs": "rollout"}, recomputed=False)
    assert all(built[i].old_logprobs is ROLLOUT[i] for i in range(4))
    assert not [name for name in metrics if name.startswith("rollout_corr/")], "there is nothing to compare"
    total = -sum(ROLLOUT[i].values.astype(np.float64).sum() for i in range(4))
    assert metrics["rollout/entropy"] == pytest.approx(total / 12, rel=1e-5)
    assert "objective/entropy" not in metrics, "the actor's is known in the update alone"


def test_old_logprobs_may_come_from_the_update() -> None:
    """The experience is the same without them; metrics that read them come from the update."""
    built, metrics = build({}, recomputed=False, max_staleness=3)
    expected, told = build({}, max_staleness=3)
    missing = {name for name in told if name.startswith(("rollout_corr/", "rollout/logprob_gap", "objective/entropy"))}
    assert metrics == {name: value for name, value in told.items() if name not in missing}
    for chunk, row in ROWS:
        assert built[chunk].old_logprobs is None
        assert built[chunk].rollout_logprobs is ROLLOUT[chunk]
        np.testing.assert_array_equal(built[chunk].advantages[row], expected[chunk].advantages[row])
        assert built[chunk].ages is not None
        assert built[chunk].ages[row].tolist() == ages(chunk, row)
    assert all(chunk.ages is None for chunk in expected.values())


@pytest.mark.parametrize("method", ["loglinear", "linear"])
def test_the_loss_gets_interpolation_weights_of_the_proximal_logprobs(method: str) -> None:
    """The proximal policy is one step before the newest on the way from the rollout's version."""
    built, _ = build({"old_logprobs": method}, recomputed=False)
    for chunk, row in ROWS:
        assert built[chunk].old_logprobs is built[chunk].rollout_logprobs is ROLLOUT[chunk]
        alpha = built[chunk].proximal_weights
        assert alpha is not None
        expected = [{0: 0.0, 1: 1 / 2, 3: 3 / 4}[age] for age in ages(chunk, row)]
        np.testing.assert_allclose(alpha[row], expected, rtol=1e-6)


def test_sequence_masking_uses_rollout_logprobs() -> None:
    built, _ = build({"sequence_mask": {"delta": 1e-4}})
    assert all(built[i].rollout_logprobs is ROLLOUT[i] for i in range(4))


def test_staleness_is_counted_per_token() -> None:
    _, metrics = build({})
    assert metrics["staleness/mean"] == pytest.approx(np.mean(np.concatenate([ages(*where) for where in ROWS])))
    assert metrics["staleness/max"] == 3
    assert "staleness/min" not in metrics


def test_logprob_differences_are_reported_by_token_age() -> None:
    _, metrics = build({}, max_staleness=3)
    by_age: dict[int, list[float]] = {age: [] for age in range(4)}
    for chunk, row in ROWS:
        for age, gap in zip(ages(chunk, row), np.abs(OLD[chunk][row] - ROLLOUT[chunk][row]), strict=True):
            by_age[age].append(gap)
    tokens = sum(map(len, by_age.values()))
    for age, gaps in by_age.items():
        assert metrics[f"staleness/age_{age}"] == pytest.approx(len(gaps) / tokens)
        if gaps:
            assert metrics[f"rollout/logprob_gap/age_{age}"] == pytest.approx(np.mean(gaps), rel=1e-5)
        else:
            assert f"rollout/logprob_gap/age_{age}" not in metrics
    assert metrics["rollout/version_spans"] == pytest.approx(np.mean([len(set(ages(*where))) for where in ROWS]))
