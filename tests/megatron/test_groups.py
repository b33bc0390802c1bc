"""Which ranks are in which group, against Megatron's own generator of ranks."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.stacks import IN_COLLECTIVE
from megarl.types import Layout
from tests.leftovers import comes_true
from tests.pool import RankPool

ORDER = "tp-cp-ep-dp-pp"
DENSE = {("tp",): "tp", ("dp",): "dp", ("pp",): "pp", ("tp", "pp"): "tp-pp", ("tp", "dp"): "tp-dp"}
EXPERT = {("ep",): "ep", ("expt_dp",): "dp", ("tp", "ep"): "tp-ep", ("tp", "ep", "pp"): "tp-ep-pp"}
"""By the coordinates in which the ranks of a group differ, as Megatron writes them."""


def _megatrons(tp: int, ep: int, dp: int, pp: int) -> Any:
    from megatron.core.parallel_state import RankGenerator

    return RankGenerator(tp=tp, ep=ep, dp=dp, pp=pp, cp=1, order=ORDER)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of what Megatron imports
@pytest.mark.parametrize("layout", [Layout(tp=2, dp=4, pp=3, ep=2), Layout(tp=3, dp=4, ep=4), Layout(dp=2, pp=2)])
def test_groups_equal_megatrons(layout: Layout) -> None:
    from megarl.megatron.parallel import partition

    dense = _megatrons(layout.tp, 1, layout.dp, layout.pp)
    expert = _megatrons(layout.tp, layout.ep, layout.dp // layout.ep, layout.pp)
    for generator, names in ((dense, DENSE), (expert, EXPERT)):
        for ours, theirs in names.items():
            assert sorted(partition(layout, *ours)) == sorted(map(tuple, generator.get_ranks(theirs))), ours


def _late(rank: int) -> list[list[str]]:
    import torch
    import torch.distributed as dist

    from megarl.megatron.parallel import GroupCache, collectives

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
    from megarl.megatron.parallel import recorded

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
