"""Group advantages: against naive loops over groups, and invariances."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.algos import group_advantages
from megarl.algos.advantages import broadcast_advantages
from megarl.algos.group_advantages import Samples
from megarl.algos.registry import GROUP_ADVANTAGES
from tests.algos.inputs import NAN, lengths_mask
from tests.algos.vectors_of_experience import samples_of as in_groups
from tests.oracle import comparisons as naive
from tests.oracle.models import Sample
from tests.unit_profile import fewer

Comparison = Callable[[Samples], Tensor]

drawn = st.lists(
    st.tuples(st.integers(0, 2), st.none() | st.integers(-8, 8).map(lambda n: n / 4), st.booleans(), st.integers(1, 9)),
    min_size=1,
    max_size=14,
)
"""Group, score or none, whether it ended, and length of each sample of a step."""
WEIGHTS = (1.0, 0.5)
OPTIONS: dict[str, dict[str, Any]] = {"grpo": {"ddof": 0, "eps": 1e-4}, "batch_std": {"eps": 1e-4}}


def samples_of(rows: list[tuple[int, float | None, bool, int]]) -> Samples:
    """Samples without a score have NaN."""
    names = sorted({row[0] for row in rows})
    scores = torch.tensor([NAN if row[1] is None else row[1] for row in rows], dtype=torch.float64)
    return Samples(
        scores=scores,
        groups=torch.tensor([names.index(row[0]) for row in rows]),
        lengths=torch.tensor([row[3] for row in rows]),
        finished=torch.tensor([row[2] for row in rows]),
        scored=torch.tensor([row[1] is not None for row in rows]),
        components=torch.stack([scores, 3 - scores.square()], dim=-1),
        weights=WEIGHTS,
        greedy_scores=torch.arange(len(rows)).double(),
    )


def naive_samples(rows: list[tuple[int, float | None, bool, int]]) -> list[Sample]:
    return [
        Sample(
            sample_id=str(i),
            prompt_ids=[0],
            response_ids=[0] * length,
            score=score,
            finished=finished,
            group=group,
            components=() if score is None else (score, 3 - score**2),
            greedy_score=float(i),
        )
        for i, (group, score, finished, length) in enumerate(rows)
    ]


FUNCTIONS = {name: GROUP_ADVANTAGES.function(name) for name in GROUP_ADVANTAGES.functions}
ORACLES = sorted(FUNCTIONS.keys() - {"reinforce_pp_baseline", "none"})


@pytest.mark.parametrize("name", ORACLES)
@given(drawn)
def test_group_advantages_equal_the_oracles(name: str, rows: list[tuple[int, float | None, bool, int]]) -> None:
    options = OPTIONS.get(name, {})
    oracle = partial(getattr(naive, name), **options, **({"weights": WEIGHTS} if name == "gdpo" else {}))
    if name == "gdpo":
        rows = [(group, 0.5 if score is None else score, *rest) for group, score, *rest in rows]
    if name == "batch_std" and sum(row[1] is not None for row in rows) < 2:
        rows = [*rows, (9, 1.0, True, 1), (9, 0.0, True, 1)]
    expected = oracle(naive_samples(rows), [row[1] for row in rows])
    assert FUNCTIONS[name](samples_of(rows), **options).tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
@settings(max_examples=fewer(30))
@given(drawn)
def test_samples_without_a_score_get_0_and_change_nothing(
    name: str, rows: list[tuple[int, float | None, bool, int]]
) -> None:
    compare, samples = FUNCTIONS[name], samples_of(rows)
    advantages = compare(samples)
    assert not advantages[~samples.scored].any()
    assert advantages.isfinite().all()
    kept = [row for row in rows if row[1] is not None]
    if kept and name != "remax":
        torch.testing.assert_close(advantages[samples.scored], compare(samples_of(kept)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", sorted(FUNCTIONS.keys() - {"remax"}))
def test_t8_equal_scores_and_single_samples_have_advantage_exactly_0(name: str, dtype: torch.dtype) -> None:
    """0.1 is no binary fraction: the mean of seven of them is another number."""
    scores = torch.tensor([0.1] * 7 + [5.0], dtype=dtype)
    n = len(scores)
    known = {"lengths": torch.arange(1, n + 1), "components": torch.stack([scores, scores * 3], dim=-1)}
    samples = in_groups(scores, [0] * 7 + [1], **known, weights=WEIGHTS)
    advantages = FUNCTIONS[name](samples)
    assert advantages.tolist() == [0.0] * n
    assert advantages.dtype == dtype
    tokens = broadcast_advantages(advantages, torch.zeros(n, 4, dtype=dtype), lengths_mask([4] * n, 4))
    assert not tokens.any()


def test_remax_skips_prompts_whose_greedy_response_has_no_score() -> None:
    samples = in_groups(torch.tensor([1.0, 2.0]), [0, 1], greedy_scores=torch.tensor([0.25, NAN]))
    assert group_advantages.remax(samples).tolist() == [0.75, 0.0]


# ---- pitfalls


def test_p15_a_single_sample_has_advantage_0_unless_its_score_is_configured() -> None:
    """verl divides a single sample by 1 and subtracts 0: its score is its advantage."""
    samples = in_groups(torch.tensor([3.0, 1.0, 2.0]), [0, 1, 1])
    for name in ("grpo", "dr_grpo", "rloo", "opo"):
        assert FUNCTIONS[name](samples)[0] == 0.0
        assert FUNCTIONS[name](samples, singleton="raw")[0] == 3.0
