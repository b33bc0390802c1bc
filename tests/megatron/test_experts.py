"""Experts on several ranks, where one of them has no sample."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megarl.types import Layout
from tests.megatron.compare import state_of, trained
from tests.megatron.families import MIXTURES
from tests.megatron.samples import random_chunks
from tests.megatron.supervised import SETTINGS
from tests.megatron.tiny import load_role
from tests.pool import RankPool


def _one_sample(rank: int, directory: Path, layout: Layout, recompute: str) -> tuple[Any, Any, int]:
    """A forward pass and a step on one sample, with an offload in between."""
    from megarl.data.schedule import inference_schedule, step_schedule
    from megarl.megatron.parallel import GroupCache
    from megarl.megatron.supervised_losses import text_loss

    chunks, infos = random_chunks(chunks=1, rows=1)
    cache = GroupCache()
    role = load_role(directory, "actor", layout, rank, cache, trainable=True, head=None, recompute=recompute)
    role.start_training(SETTINGS, total_steps=1)
    dp = role.coords.dp
    before = role.logprobs(inference_schedule(infos, layout, 40).ranks[dp], chunks, temperature=1.0)
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
