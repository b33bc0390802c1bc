"""The experience of a step is the same however its chunks are spread over ranks, some of which may have none."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any, get_args

import numpy as np
import pytest

from megarl.algos import registry
from megarl.config.schema import Algo, Reject, ValueNorm
from megarl.experience.build import build_experience
from megarl.experience.records import ExperienceChunk, ExperienceReport, StepContext, TokenRewardScale
from megarl.types import Ragged
from tests.megatron.compare import reductions_over
from tests.megatron.samples import alone, columns_of, random_chunks
from tests.pool import RankPool

CHUNKS = 6
TERMS = StepContext(kl_coef=0.3, version=4, groups=CHUNKS)
IN_REWARD = {"coef": 0.1}

CASES: dict[str, dict[str, Any]] = {
    "gae with a value norm and scaled rewards": {
        "algo": {"advantage": "gae", "kl": IN_REWARD, "normalise": {"rewards": True}},
        "value_norm": True,
    },
    "vapo of dense scores": {"algo": {"advantage": "vapo"}, "dense": True},
    "levels of rewards to go, corrected": {
        "algo": {
            "advantage": "reinforce",
            "normalise": {"advantages": {"name": "levels", "mean": "group", "std": "batch"}},
            "correction": {
                "weights": {"name": "sequence_truncate", "batch_normalise": True},
                "reject": [{"statistic": "token_k3", "upper": 0.5}],
                "m2po": {"threshold": 0.1},
            },
        }
    },
    "whitened comparisons with penalties": {
        "algo": {"advantage": "reinforce_pp_baseline", "kl": IN_REWARD},
        "outcomes": True,
    },
    "normalised tokens of groups": {
        "algo": {"advantage": "grpo", "normalise": {"advantages": "grouped_tokens"}},
        "outcomes": True,
    },
    "whitened rewards to go": {"algo": {"advantage": "reinforce_pp"}},
    "interpolated": {
        "algo": {"advantage": "reinforce", "correction": {"old_logprobs": "loglinear"}},
        "recomputed": False,
    },
}

_COMPARED = {"advantage": "reinforce", "normalise": {"advantages": "none"}}
CASES |= {
    f"{name} of {what}": {"algo": {**_COMPARED, "correction": {"weights": {"name": name, "batch_normalise": scaled}}}}
    for name in registry.ROLLOUT_WEIGHTS.functions
    for what, scaled in (("mean 1", True), ("any mean", False))
}
CASES |= {
    f"without {statistic}": {
        "algo": {**_COMPARED, "correction": {"reject": [{"statistic": statistic, "upper": 1.2}]}},
    }
    for statistic in get_args(Reject.model_fields["statistic"].annotation)
}
"""Every correction that looks at the engines' log-probabilities, beside whatever else must be the same."""

SPREADS = {
    "two ranks": [[0, 3, 4], [1, 2, 5]],
    "four ranks, two without": [[1, 2], [], [0, 3, 4, 5], []],
}


def column(seed: int, per_token: int = 1) -> dict[int, Ragged]:
    random = np.random.default_rng(seed)
    chunks, _ = random_chunks(CHUNKS, min_response=0)
    return {
        i: Ragged.from_rows([random.normal(size=n * per_token) * 0.5 for n in chunk.response_ids.lengths], np.float32)
        for i, chunk in enumerate(chunks)
    }


def built(
    own: list[int], case: dict[str, Any], reduce: Any, largest: Any
) -> tuple[dict[int, ExperienceChunk], ExperienceReport]:
    """The experience of some chunks: one sample has no score, another is not trained on, and some have no token."""
    chunks, _ = random_chunks(CHUNKS, min_response=0)
    sampled = [
        replace(chunk, rollout_logprobs=logprobs) for chunk, logprobs in zip(chunks, column(0).values(), strict=True)
    ]
    random = np.random.default_rng(9)
    scores = {i: random.normal(size=3).astype(np.float32) for i in range(CHUNKS)}
    scores[2][1] = math.nan
    algo = Algo.model_validate(case["algo"])
    columns = columns_of(
        scores,
        old=column(1) if case.get("recomputed", True) else None,
        ref=column(2) if algo.kl.coef else None,
        values=column(3) if algo.advantage.name in ("gae", "vapo") else None,
        dense=column(4, per_token=2) if "dense" in case else None,
        outcomes={i: random.normal(size=3) for i in range(CHUNKS)} if "outcomes" in case else None,
        untrained=frozenset({(4, 0)}),
    )
    norm, terms = None, TERMS
    if "value_norm" in case:
        norm, terms = ValueNorm(beta=0.9), replace(terms, value_norm={"mean": 0.2, "square": 0.5, "weight": 0.3})
    if "dense" in case:
        terms = replace(terms, dense=TokenRewardScale(gain=0.5, bias=0.1, differences=True))
    return build_experience(own, sampled, columns, algo, norm, terms, reduce, largest)


def on_rank(rank: int, spread: list[list[int]]) -> dict[str, tuple[dict[int, ExperienceChunk], ExperienceReport]]:
    """Every case, on the rank's own chunks."""
    return {name: built(spread[rank], case, *reductions_over()) for name, case in CASES.items()}


@pytest.mark.dist
@pytest.mark.parametrize("spread", SPREADS.values(), ids=SPREADS)
def test_the_experience_does_not_depend_on_the_ranks(pool: RankPool, spread: list[list[int]]) -> None:
    results = pool.run(on_rank, spread, world_size=len(spread))
    for name, case in CASES.items():
        expected, report = built(list(range(CHUNKS)), case, alone, alone)
        for own, result in zip(spread, results, strict=True):
            chunks, found = result[name]
            assert sorted(chunks) == sorted(own), name
            assert found.metrics.keys() == report.metrics.keys(), name
            assert dict(found.metrics) == pytest.approx(dict(report.metrics), rel=1e-6, abs=1e-7), name
            assert found == results[0][name][1], f"{name}: ranks do not say the same, bit for bit"
            assert found.value_norm == (None if report.value_norm is None else pytest.approx(report.value_norm)), name
            for chunk, columns in chunks.items():
                same(columns, expected[chunk], f"{name}, chunk {chunk}")


def same(found: ExperienceChunk, expected: ExperienceChunk, what: str) -> None:
    for field in fields(ExperienceChunk):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(other, Ragged):
            np.testing.assert_allclose(one.values, other.values, rtol=1e-5, atol=1e-6, err_msg=f"{what}: {field.name}")
        else:
            assert one == other, f"{what}: {field.name}"


def test_the_cases_cover_every_registered_function() -> None:
    algos = [Algo.model_validate(case["algo"]) for case in CASES.values()]
    assert {algo.advantage.name for algo in algos} > registry.TOKEN_ADVANTAGES.functions.keys()
    assert {
        algo.normaliser.name for algo in algos if algo.normaliser is not None
    } == registry.NORMALISERS.functions.keys()
    assert {
        algo.correction.weights.name for algo in algos if algo.correction.weights
    } == registry.ROLLOUT_WEIGHTS.functions.keys()
