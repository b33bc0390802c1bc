"""Where the ranks of a sync meet: what they leave there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from megarl.resharding.board import Board
from megarl.resharding.session import Session
from megarl.resharding.transport import Transport, serve_store


class Connection(Transport):
    """A rank that meets the others and moves nothing."""

    def __init__(self, board: Board) -> None:
        self.board = board

    @property
    def connected(self) -> bool:
        return True

    def abort(self) -> None:
        raise AssertionError("nothing fails")

    def close(self) -> None:
        raise AssertionError("nothing ends")

    def send(self, peer: int, tag: int, buffer: torch.Tensor) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise AssertionError("nothing is sent")

    receive = send  # pyright: ignore[reportAssignmentType]


@pytest.mark.parametrize("size", [1, 3])
def test_a_store_does_not_grow_with_the_syncs(size: int) -> None:
    served = serve_store()
    store = PrefixStore("sync", served)
    sessions = [
        Session(Connection(Board(store, rank, size, 10.0)), fingerprint="f", verify=True, version=-1)
        for rank in range(size)
    ]

    def sync(session: Session, version: int) -> None:
        with session.sync(version, lambda: None):
            pass

    keys: list[int] = []
    with ThreadPoolExecutor(size) as ranks:
        for version in range(4):
            list(ranks.map(sync, sessions, [version] * size))
            keys.append(served.num_keys())
    assert keys == [keys[0]] * 4
    assert [session.version for session in sessions] == [3] * size
