"""Steps of fine-tuning and of reward models of every family, by every loss and in every layout, against naive ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.data.schedule import inference_schedule, step_schedule
from megarl.megatron.parallel import GroupCache
from megarl.megatron.supervised_losses import text_loss
from megarl.types import Layout
from tests.megatron.compare import logprobs_by_chunk, state_of, trained
from tests.megatron.families import FAMILIES, MIXTURES, MODELS
from tests.megatron.samples import random_chunks
from tests.megatron.supervised import (
    DIRECT,
    PREFERENCES,
    SETTINGS,
    Naive,
    check_steps,
    headed_state,
    naive_steps,
    scaled,
    two_steps,
)
from tests.megatron.test_parity import case_id
from tests.megatron.tiny import load_role, save_model
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
    ("qwen2", "sft", SP2, 40),
    *(("mixtral", "sft", replace(EP, **more), 40) for more in ({"ep": 1}, {}, {"dp": 4}, {"pp": 2})),
    *((name, "sft", replace(EP, pp=2, vpp=2), 40) for name in ("mixtral", "several_kinds")),
    *((name, "sft", replace(SP2, dp=2, ep=2), 40) for name in ("mixtral", "qwen3_moe", "glm4_moe", "deepseek_v3")),
    *((name, "sft", replace(EP, pp=2), 40) for name in ("glm4_moe_lite", "deepseek_v2", "qwen2_moe", "qwen3_next")),
    *(("gpt_oss", "sft", layout, 40) for layout in (ONE, replace(EP, pp=2), replace(SP2, pp=2))),
    *((name, "sft", Layout(), 40) for name in ("qwen3_5", "qwen3_5_moe", "gemma3", "deepseek_v3")),
    ("qwen3_5_moe", "sft", replace(SP2, pp=2), 40),
    *(("plain", "all tokens", layout, 40) for layout in (replace(SP2, pp=2), DP4)),
    *((name, "pairwise", SP2, 40) for name in ("gpt2", "phi3", "qwen3")),
    *(("qwen3_moe_renormalised", "pairwise", layout, 40) for layout in (ONE, Layout(dp=3, ep=3), SP2)),
    ("plain", "pairwise", replace(INTERLEAVED, dp=2), 40),
    ("plain", "dpo", DP4, 40),  # the second step has three preferences: one of four replicas has none
    *(("plain", loss, replace(SP2, pp=2), 40) for loss in (*PREFERENCES, *DIRECT)),
    *(("plain", "dpo", layout, 40) for layout in (ONE, replace(INTERLEAVED, dp=2))),
    *((name, "dpo", replace(SP2, dp=2, ep=2), 40) for name in ("mixtral", "qwen3_moe")),
]
MORE = [
    *((name, "sft", Layout(pp=4), 40) for name in FAMILIES),
    *(("llama", "sft", layout, 40) for layout in (TP2, INTERLEAVED, replace(SP2, pp=2))),
    *((name, "pairwise", SP2, 40) for name in FAMILIES if name not in ("gpt2", "phi3", "qwen3")),
    *(("plain", loss, DP4, 40) for loss in (*PREFERENCES, *DIRECT) if loss != "dpo"),
]
"""Of `make matrix`."""


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


@pytest.mark.parametrize(
    ("model", "loss", "layout", "budget"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.matrix) for case in MORE)],
    ids=case_id,
)
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
    if loss in PREFERENCES or loss in DIRECT:
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


def _one_sample(rank: int, directory: Path, layout: Layout, recompute: str) -> tuple[Any, Any, int]:
    """A forward pass and a step on one sample, with an offload in between."""
    chunks, infos = random_chunks(chunks=1, rows=1)
    cache = GroupCache()
    role = load_role(directory, "actor", layout, rank, cache, trainable=True, recompute=recompute)
    role.start_training(SETTINGS, total_steps=1)
    dp = role.coords.dp
    before = logprobs_by_chunk(role, inference_schedule(infos, layout, 40).ranks[dp], chunks, 1.0)
    released = role.offload()
    role.onload()
    steps = role.update([step_schedule(infos, layout, 40).ranks[dp]], chunks, partial(text_loss, role))
    return before, trained(role, steps), released


@pytest.mark.dist
def test_a_rank_without_samples_takes_part_in_expert_parallelism(pool: RankPool, tmp_path: Path) -> None:
    """One sample on two replicas: the other one computes padding, in training with whole layers computed again too."""
    directory = MIXTURES["mixtral"].save(tmp_path / "model")
    ((expected, alone, _),) = pool.run(_one_sample, directory, Layout(), "none", world_size=1)
    start = state_of(directory)
    whole = {name: value for name, _, value in alone["shards"] if value.shape == start[name].shape}
    results = pool.run(_one_sample, directory, Layout(dp=2, ep=2), "full", world_size=2)
    assert [sorted(before) for before, _, _ in results] == [[0], []], "the second replica has no sample"
    assert results[0][0][0][0] == pytest.approx(expected[0][0], abs=1e-5)
    for _, shared, released in results:
        step, want = shared["steps"][0], alone["steps"][0]
        assert [step[key] for key in ("loss", "grad_norm")] == pytest.approx(
            [want[key] for key in ("loss", "grad_norm")], rel=1e-5
        )
        assert released >= sum(value.nbytes for _, _, value in shared["shards"])
        for name, region, value in shared["shards"]:
            if name in whole:
                moved = (whole[name] - start[name]).abs().max()
                assert (value - whole[name][region]).abs().max() <= 1e-3 * moved + 1e-6, name
    experts = [{name for name, *_ in shared["shards"] if ".experts." in name} for _, shared, _ in results]
    assert not experts[0] & experts[1]
    assert len(experts[0]) == len(experts[1]) == 5 * 3 * 3
