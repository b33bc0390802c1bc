"""Steps of fine-tuning and of reward models of every family, by every loss and in every layout, against naive ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from megarl.types import Layout
from tests.megatron.compare import state_of
from tests.megatron.families import FAMILIES, MODELS
from tests.megatron.supervised import (
    PREFERENCES,
    Naive,
    check_steps,
    headed_state,
    naive_steps,
    scaled,
    two_steps,
)
from tests.megatron.test_parity import case_id
from tests.megatron.tiny import save_model
from tests.pool import RankPool

pytestmark = pytest.mark.dist

ONE, TP2, SP2 = Layout(), Layout(tp=2), Layout(tp=2, sequence_parallel=True)
INTERLEAVED, DP4 = Layout(pp=2, vpp=2), Layout(dp=4)
EP = Layout(dp=2, ep=2)
PLAIN = [(ONE, 1000), (ONE, 20), (replace(TP2, dp=2), 40), (replace(INTERLEAVED, dp=2), 40), (DP4, 40)]


def _by_tp(layout: Layout, name: str) -> Layout:
    """The layout, with the first TP of the family for which the pool has ranks."""
    if layout.tp == 1:
        return layout
    return next(fit for tp in MODELS[name].tp if (fit := replace(layout, tp=tp)).world_size <= 4)


CASES = [
    *(("plain", "sft", *case) for case in PLAIN),
    *((name, "sft", replace(SP2, pp=2, vpp=2), 40) for name in FAMILIES if name != "qwen2"),  # TP 3 alone
    *((name, "sft", Layout(pp=4), 40) for name in FAMILIES),
    *(("llama", "sft", layout, 40) for layout in (TP2, INTERLEAVED, replace(SP2, pp=2))),
    ("qwen2", "sft", SP2, 40),
    *(("mixtral", "sft", replace(EP, **more), 40) for more in ({"ep": 1}, {}, {"dp": 4}, {"pp": 2})),
    *((name, "sft", replace(EP, pp=2, vpp=2), 40) for name in ("mixtral", "qwen3_moe")),
    *((name, "sft", replace(SP2, dp=2, ep=2), 40) for name in ("mixtral", "qwen3_moe")),
    *(("plain", "all tokens", layout, 40) for layout in (replace(SP2, pp=2), DP4)),
    *((name, "pairwise", SP2, 40) for name in FAMILIES),
    *(("qwen3_moe_renormalised", "pairwise", layout, 40) for layout in (ONE, Layout(dp=3, ep=3), SP2)),
    ("plain", "pairwise", replace(INTERLEAVED, dp=2), 40),
    # The second step has three preferences: one of four replicas has none.
    *(("plain", loss, layout, 40) for loss in PREFERENCES for layout in (replace(SP2, pp=2), DP4)),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Path, Naive]]:
    """A model, and its naive steps."""

    @cache
    def directory(model: str) -> Path:
        return MODELS[model].save(tmp_path_factory.mktemp(model))

    @cache
    def case(model: str, loss: str) -> tuple[Path, Naive]:
        return directory(model), naive_steps(directory(model), loss)

    return case


@pytest.mark.parametrize(("model", "loss", "layout", "budget"), CASES, ids=case_id)
def test_steps_equal_the_naive_ones(
    pool: RankPool,
    made: Callable[[str, str], tuple[Path, Naive]],
    model: str,
    loss: str,
    layout: Layout,
    budget: int,
) -> None:
    layout = _by_tp(layout, model)
    directory, naive = made(model, loss)
    results = pool.run(two_steps, directory, loss, layout, budget, world_size=layout.world_size)
    if loss in PREFERENCES:
        assert 0 < sum(step.metrics["accuracy"] for step in naive[0]) < 2, "preferences of both kinds"
    check_steps(results, naive, headed_state(directory) if loss in PREFERENCES else state_of(directory))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_a_head_can_be_scaled(pool: RankPool, tmp_path: Path, dtype: torch.dtype, tolerance: float) -> None:
    """The weights that the optimizer steps are scaled with it: a step does not bring the old ones back."""
    directory, layout = save_model(tmp_path / "model"), Layout(pp=2, dp=2)
    for before, *after in pool.run(scaled, directory, layout, dtype, world_size=layout.world_size):
        for found in after:
            assert (before is None) == (found is None)
            for chunk, scores in (before or {}).items():
                np.testing.assert_allclose(found[chunk], 3 * scores, rtol=tolerance)
