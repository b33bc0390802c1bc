"""What keeps roles apart and losses honest: no global parallel state, and the factor on a loss is measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.types import Layout
from tests.megatron.samples import random_chunks
from tests.megatron.tiny import load_role, save_model
from tests.pool import RankPool


def _global_reads(rank: int, directory: Path) -> list[str]:
    """Runs two roles while every reader of Megatron's global parallel state notes that it was called."""
    from megatron.core import parallel_state

    from megarl.data.schedule import inference_schedule
    from megarl.megatron.groups import GroupCache

    read: list[str] = []
    kept = {}
    for name in dir(parallel_state):
        reader = getattr(parallel_state, name)
        if name.startswith(("get_", "is_pipeline", "is_rank")) and callable(reader):
            kept[name] = reader
            setattr(
                parallel_state, name, lambda *a, _name=name, _reader=reader, **k: read.append(_name) or _reader(*a, **k)
            )
    try:
        cache, (rollouts, infos) = GroupCache(), random_chunks()
        for layout in (Layout(tp=2, pp=2), Layout(pp=2, dp=2)):
            role = load_role(directory, "actor", layout, rank, cache, trainable=True, head=None)
            role.logprobs(inference_schedule(infos, layout, 40), rollouts, temperature=1.0)
    finally:
        for name, reader in kept.items():
            setattr(parallel_state, name, reader)
    assert not parallel_state.is_initialized()
    with pytest.raises(AssertionError, match="not initialized"):
        parallel_state.get_tensor_model_parallel_group()
    return sorted(set(read))


@pytest.mark.dist
def test_roles_do_not_read_global_parallel_state(pool: RankPool, tmp_path: Path) -> None:
    """Readers that answer "none" instead of raising would mix roles up silently, so none may be asked but the memory
    buffer, which belongs to no layout."""
    directory = save_model(tmp_path / "model")
    for read in pool.run(_global_reads, directory, world_size=4):
        assert set(read) <= {"get_global_memory_buffer"}, read


def _loss_factors(rank: int, directory: Path) -> tuple[float, float]:
    import dataclasses

    from megatron.core.distributed import DistributedDataParallelConfig

    from megarl.megatron.groups import GroupCache
    from megarl.megatron.loss_scale import probe_loss_factor

    layout = Layout(dp=2)
    role = load_role(directory, "actor", layout, rank, GroupCache(), trainable=True, head=None)
    ours, groups = role.model.config, role.model.groups
    averaging = dataclasses.replace(ours, calculate_per_token_loss=False)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    return probe_loss_factor(ours, ddp, groups), probe_loss_factor(averaging, ddp, groups)


@pytest.mark.dist
def test_the_factor_on_a_loss_is_measured(pool: RankPool, tmp_path: Path) -> None:
    """Where Megatron averages, over two micro-batches and two DP ranks here, the probe sees a quarter."""
    for summed, averaged in pool.run(_loss_factors, save_model(tmp_path / "model"), world_size=2):
        assert summed == 1.0
        assert averaged == 0.25
