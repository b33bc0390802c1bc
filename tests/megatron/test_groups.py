"""Process groups against Megatron's own ranks; no role reads the global ones, and the scaling of a loss is measured."""

from __future__ import annotations

from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

from megarl.config.schema import Optimizer
from megarl.data.schedule import inference_schedule, update_schedules
from megarl.megatron.heads import response_values
from megarl.megatron.loss_metrics import LossMetrics
from megarl.megatron.parallel import GroupCache, build_groups, collectives, partition, recorded
from megarl.megatron.pipeline import probe_loss_factor
from megarl.stacks import IN_COLLECTIVE
from megarl.types import Layout
from tests.leftovers import comes_true
from tests.megatron.samples import random_chunks
from tests.megatron.tiny import load_role, save_model
from tests.pool import RankPool

ORDER = "tp-cp-ep-dp-pp"
DENSE = {("tp",): "tp", ("dp",): "dp", ("pp",): "pp", ("tp", "pp"): "tp-pp", ("tp", "dp"): "tp-dp"}
EXPERT = {("ep",): "ep", ("expt_dp",): "dp", ("tp", "ep"): "tp-ep", ("tp", "ep", "pp"): "tp-ep-pp"}
"""By the coordinates in which the ranks of a group differ, as Megatron writes them."""


def _megatrons(tp: int, ep: int, dp: int, pp: int) -> Any:
    from megatron.core.parallel_state import RankGenerator

    return RankGenerator(tp=tp, ep=ep, dp=dp, pp=pp, cp=1, order=ORDER)


@pytest.mark.parametrize("layout", [Layout(tp=2, dp=4, pp=3, ep=2), Layout(tp=3, dp=4, ep=4), Layout(dp=2, pp=2)])
def test_groups_equal_megatrons(layout: Layout) -> None:
    dense = _megatrons(layout.tp, 1, layout.dp, layout.pp)
    expert = _megatrons(layout.tp, layout.ep, layout.dp // layout.ep, layout.pp)
    for generator, names in ((dense, DENSE), (expert, EXPERT)):
        for ours, theirs in names.items():
            assert sorted(partition(layout, *ours)) == sorted(map(tuple, generator.get_ranks(theirs))), ours


def _late(rank: int) -> list[list[str]]:
    import torch
    import torch.distributed as dist

    everyone, store = (0, 1), dist.distributed_c10d._get_default_store()

    def settled() -> list[str]:
        """What is told when Gloo's thread has noted the end."""
        assert comes_true(lambda: IN_COLLECTIVE not in collectives()[0])
        return collectives()

    group = GroupCache().mine([everyone], rank)
    dist.all_reduce(torch.ones(1), group=group)
    if rank == 1:
        store.wait(["the other one has begun"])
    found = [settled()]
    work = dist.all_reduce(torch.ones(3, 2), group=group, async_op=True)
    found.append(collectives())
    store.set("the other one has begun", "")
    assert work is not None
    work.wait()
    return [*found, settled()]


@pytest.mark.dist
def test_the_flight_recorder_tells_which_rank_is_late(pool: RankPool) -> None:
    first, second = pool.run(_late, world_size=2)
    begun, doing, done = (
        "ranks 0, 1: 1 collectives begun, 1 finished",
        "ranks 0, 1: 2 collectives begun, 1 finished; in gloo:all_reduce [[3, 2]] for ",
        "ranks 0, 1: 2 collectives begun, 2 finished",
    )
    assert (first[0][0], second[0][0]) == (begun, begun)
    assert first[1][0].startswith(doing)
    assert (first[2][0], second[2][0]) == (done, done)


def test_a_record_of_nccl_is_told() -> None:
    """Made by hand, as ProcessGroupNCCL fills the recorder; the third collective of group 1 has begun on the device."""

    def entry(group: int, name: str, state: str, *, retired: bool) -> dict[str, object]:
        return {
            "pg_id": group,
            "process_group": [str(group), ["default_pg", "ranks 0, 2"][group]],
            "profiling_name": name,
            "input_sizes": [[8, 4]],
            "state": state,
            "retired": retired,
            "time_created_ns": 1_000_000_000,
        }

    trace = {
        "entries": [
            entry(1, "nccl:all_reduce", "completed", retired=True),
            entry(0, "nccl:broadcast", "completed", retired=False),
            entry(1, "nccl:_all_gather_base", "started", retired=False),
        ],
        "pg_status": {"1": {"last_enqueued_collective": 3, "last_completed_collective": 2}},
    }
    assert list(recorded({"version": "2.10"}, 3_500_000_000)) == []  # torch's dump of a recorder that is empty
    assert list(recorded(trace, 3_500_000_000)) == [
        "ranks 0, 2: 3 collectives begun, 2 finished; in nccl:_all_gather_base [[8, 4]] for 2.5 s",
        "default_pg: 0 collectives begun, 0 finished",
    ]


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
        actor = load_role(directory, "actor", one, rank, cache)
        actor.logprobs(inference_schedule(infos, one, 40).ranks[0], rollouts, 1.0)
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

    cache = GroupCache()
    role = load_role(directory, "actor", Layout(dp=2), rank, cache, trainable=True)
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
