"""Each loss of the reward model, and fine-tuning on all tokens, under layouts against the naive steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megarl.types import Layout
from tests.megatron.compare import check, state_of
from tests.megatron.preferences import LOSSES, compared, naively_compared, naively_tuned_on_all, scaled, tuned_on_all
from tests.megatron.supervised import Naive, headed_state
from tests.megatron.test_parity import layout_id
from tests.megatron.tiny import save_model
from tests.pool import RankPool

CASES = [
    # layout, tokens per micro-batch
    (Layout(), 1000),
    (Layout(tp=2, pp=2, sequence_parallel=True), 40),
    (Layout(tp=2, dp=2), 40),
    (Layout(dp=4), 40),  # the second step has three preferences: one replica has none
]


def _case_id(value: object) -> str:
    return layout_id(value) if isinstance(value, Layout) else str(value)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def preferred(directory: Path) -> dict[str, Naive]:
    return {name: naively_compared(directory, name) for name in LOSSES}


@pytest.fixture(scope="module")
def tuned(directory: Path) -> Naive:
    return naively_tuned_on_all(directory)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "layout", "budget"),
    [(name, *case) for name in LOSSES for case in (CASES if name == next(iter(LOSSES)) else CASES[1::2])],
    ids=_case_id,
)
def test_the_losses_equal_the_naive_ones(
    pool: RankPool, directory: Path, preferred: dict[str, Naive], name: str, layout: Layout, budget: int
) -> None:
    results = pool.run(compared, directory, name, layout, budget, world_size=layout.world_size)
    check(results, *preferred[name], headed_state(directory))


@pytest.mark.dist
@pytest.mark.parametrize(("layout", "budget"), CASES[1::2], ids=_case_id)
def test_every_token_can_be_trained_on(
    pool: RankPool, directory: Path, tuned: Naive, layout: Layout, budget: int
) -> None:
    results = pool.run(tuned_on_all, directory, layout, budget, world_size=layout.world_size)
    check(results, *tuned, state_of(directory))


@pytest.mark.dist
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_a_head_can_be_scaled(pool: RankPool, directory: Path, dtype: torch.dtype, tolerance: float) -> None:
    """The weights that the optimizer steps are scaled with it: a step does not bring the old ones back."""
    layout = Layout(pp=2, dp=2)
    for told in pool.run(scaled, directory, layout, dtype, world_size=layout.world_size):
        before, *scaled_and_stepped = told
        for after in scaled_and_stepped:
            assert (before is None) == (after is None)
            for chunk, scores in (before or {}).items():
                np.testing.assert_allclose(after[chunk], 3 * scores, rtol=tolerance)
