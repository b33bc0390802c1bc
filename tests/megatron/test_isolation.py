"""Roles use no global parallel state, and the scaling of a loss is measured."""

from __future__ import annotations

from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

from megarl.megatron.loss_metrics import LossMetrics
from megarl.types import Layout
from tests.megatron.samples import random_chunks
from tests.megatron.tiny import load_role, save_model
from tests.pool import RankPool

ALLOWED = {
    "get_global_memory_buffer",  # scratch memory, which belongs to no layout
    "get_embedding_group",  # asked on stages between the ends, where ``embd`` is None, and answered with None
    "is_initialized",  # no
    # Of groups that rebuild weights over DP, which no role has: None, and rank 0.
    "get_gtp_weight_remat_group",
    "get_expert_gtp_weight_remat_group",
    "get_gtp_weight_remat_rank",
}


def _global_reads(rank: int, directory: Path) -> list[str]:
    """Trains a role and runs another while every reader of Megatron's global parallel state notes who was asked.

    Modules bind the readers by name, so the names are replaced wherever Megatron has them.
    """
    import sys

    from megatron.core import parallel_state

    from megarl.config.schema import Optimizer
    from megarl.data.schedule import inference_schedule, update_schedules
    from megarl.megatron.heads import response_values
    from megarl.megatron.parallel import GroupCache

    read: list[str] = []

    def noting(name: str, reader: Any) -> Any:
        return lambda *args, **kwargs: read.append(name) or reader(*args, **kwargs)

    readers = {
        getattr(parallel_state, name): noting(name, getattr(parallel_state, name))
        for name in dir(parallel_state)
        if name.startswith(("get_", "is_"))
        and callable(getattr(parallel_state, name))
        and getattr(parallel_state, name).__module__ == parallel_state.__name__
    }
    modules = [module for name, module in sys.modules.items() if name.startswith("megatron.core") and module]
    bound = [
        (module, name, value)
        for module in modules
        for name, value in list(vars(module).items())
        if isinstance(value, FunctionType) and value in readers
    ]
    for module, name, value in bound:
        setattr(module, name, readers[value])
    try:
        cache, (rollouts, infos) = GroupCache(), random_chunks()
        one, other = Layout(tp=2, pp=2, sequence_parallel=True), Layout(pp=4)
        actor = load_role(directory, "actor", one, rank, cache, trainable=False, head=None)
        actor.logprobs(inference_schedule(infos, one, 40).ranks[0], rollouts, temperature=1.0)
        critic = load_role(directory, "critic", other, rank, cache, trainable=True, head=torch.ones(1, 32))
        critic.start_training(Optimizer(lr=1e-3), total_steps=1)

        def loss(batch: Any, hidden: torch.Tensor) -> Any:
            return response_values(critic.model, batch, hidden).sum(), LossMetrics()

        plan = update_schedules(infos, other, 40, mini_batches=1, epochs=1, seed=0, step=0)
        critic.update([schedule.ranks[0] for schedule in plan], rollouts, lambda _schedule: loss)
    finally:
        for module, name, value in bound:
            setattr(module, name, value)
    assert len(bound) > len(readers), "no module but parallel_state has a reader"
    assert not parallel_state.is_initialized()
    with pytest.raises(AssertionError, match="not initialized"):
        parallel_state.get_tensor_model_parallel_group()
    return sorted(set(read))


@pytest.mark.dist
def test_roles_read_no_global_parallel_state(pool: RankPool, tmp_path: Path) -> None:
    """A reader that answered with another role's group would mix the roles up silently."""
    directory = save_model(tmp_path / "model")
    asked = {name for read in pool.run(_global_reads, directory, world_size=4) for name in read}
    assert {"is_initialized", "get_embedding_group"} <= asked <= ALLOWED


def _loss_factors(rank: int, directory: Path, ep: int) -> tuple[float, float]:
    import dataclasses

    from megatron.core.distributed import DistributedDataParallelConfig

    from megarl.megatron.parallel import GroupCache, build_groups
    from megarl.megatron.pipeline import probe_loss_factor

    cache = GroupCache()
    role = load_role(directory, "actor", Layout(dp=2), rank, cache, trainable=True, head=None)
    ours, groups = role.model.config, build_groups(Layout(dp=2, ep=ep), rank, cache)
    averaging = dataclasses.replace(ours, calculate_per_token_loss=False)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    return probe_loss_factor(ours, ddp, groups), probe_loss_factor(averaging, ddp, groups)


@pytest.mark.dist
@pytest.mark.parametrize("ep", [1, 2])
def test_the_factor_on_a_loss_is_measured(pool: RankPool, tmp_path: Path, ep: int) -> None:
    """Where Megatron averages, over two micro-batches and two DP ranks here, the probe sees a quarter."""
    for summed, averaged in pool.run(_loss_factors, save_model(tmp_path / "model"), ep, world_size=2):
        assert summed == 1.0
        assert averaged == 0.25
