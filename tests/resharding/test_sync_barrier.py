"""The barrier of a sync and its keys in the store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from megarl.resharding import BarrierWatch, SyncError
from megarl.resharding.sync_barrier import CONNECTING, SyncBarrier, open_store, serve_store, sync_places


def barriers_at(served: TCPStore, size: int, timeout_s: float = 10.0) -> list[SyncBarrier]:
    """Those of several ranks, as in processes of their own."""
    return [SyncBarrier(open_store("127.0.0.1", served.port, "sync"), rank, size, timeout_s) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 3])
def test_the_store_does_not_grow_with_syncs(size: int) -> None:
    served = serve_store()
    barriers = barriers_at(served, size)
    keys: list[int] = []

    def meet(barrier: SyncBarrier, count: int) -> None:
        barrier.post("buffer", f"{count}")
        barrier.meet(f"{count}", {"plan": "p", "version": f"{count}"})
        barrier.forget(f"{count - 1}")

    with ThreadPoolExecutor(size) as ranks:
        for count in range(4):
            list(ranks.map(meet, barriers, [count] * size))
            keys.append(served.num_keys())
    assert keys == [keys[0]] * 4


def test_ranks_that_disagree_report_both_values() -> None:
    store = serve_store()
    one, other = barriers_at(store, 2)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(one.meet, "here", {"plan": "p", "version": "1"})
        while not store.check(["sync/here/0"]):
            pass
        expected = "sync aborted: rank 1: version 2 differs from another rank's, 1"
        with pytest.raises(SyncError, match=expected):
            other.meet("here", {"plan": "p", "version": "2"})
        with pytest.raises(SyncError, match=expected):
            waiting.result()


def test_the_first_decision_holds_for_all_ranks() -> None:
    store = serve_store()
    one, other = barriers_at(store, 2, timeout_s=0.1)
    with pytest.raises(SyncError, match=r"rank 0: ranks \[1\] did not come within 0.1 s"):
        one.meet("here")
    for late in (lambda: other.meet("here"), lambda: other.abort("here", "no"), lambda: other.look("here")):
        with pytest.raises(SyncError, match="rank 0: ranks"):
            late()
    other.look("there")


def test_the_driver_sees_absent_ranks_and_aborts_the_others() -> None:
    store = serve_store()
    watch = BarrierWatch(store, "sync", 3)
    barriers = barriers_at(store, 3)
    connect = CONNECTING[0]
    with ThreadPoolExecutor(3) as ranks:
        list(ranks.map(lambda barrier: barrier.meet(connect), barriers))
        assert watch.absent() == []
        watch.begin()
        assert watch.absent() == [0, 1, 2]
        agreed, ready, done = sync_places(1)
        waiting = [ranks.submit(barrier.meet, agreed) for barrier in barriers[::2]]
        while watch.absent() != [1]:
            pass
        watch.abort("engine 0 has died.")
        for rank in waiting:
            with pytest.raises(SyncError, match=r"^sync aborted: engine 0 has died\.$"):
                rank.result()
    for place in (ready, done):
        with pytest.raises(SyncError, match=r"engine 0 has died"):
            barriers[1].look(place)


def test_a_commit_is_final() -> None:
    store = serve_store()
    (barrier,) = barriers_at(store, 1)
    watch = BarrierWatch(store, "sync", 1)
    watch.begin()
    done = sync_places(1)[-1]
    barrier.meet(done)
    watch.abort("engine 0 has died.")
    barrier.look(done)
