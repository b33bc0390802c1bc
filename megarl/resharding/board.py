"""Where the ranks of a sync meet: a store on which they post that they have arrived, or why they will not."""

from __future__ import annotations

import time
from typing import NoReturn

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]  (public by its documentation)

from megarl.resharding.records import SyncError

_POLL_S = (0.001, 0.05)
"""The first and the longest pause between two looks at the store."""

_GO = "go"


class Board:
    """One rank's access to a store that all ranks share.

    A place is a key prefix, where the ranks meet once. It gets one verdict, which the first to decide sets for all: the
    last rank to arrive lets everybody go on; a rank that fails, or waits for too long, aborts.

    Args:
        store: keys are the board's own.
        rank, size: this rank of how many.
        timeout_s: how long to wait for the others.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._store = store
        self._rank = rank
        self._size = size
        self._agreed: dict[str, list[str]] = {}

    def meet(self, place: str) -> None:
        """Waits until every rank is at this place.

        Unblocked by the last rank's arrival, by another rank's abort, or by the timeout, which aborts.

        Raises:
            SyncError: somebody aborted.
        """
        self._store.set(f"{place}/{self._rank}", "here")
        if self._store.add(f"{place}/count", 1) == self._size:
            self._store.compare_set(_verdict(place), "", _GO)
        pause, limit = _POLL_S
        deadline = time.monotonic() + self.timeout_s
        while not self._store.check([_verdict(place)]):
            if time.monotonic() > deadline:
                absent = [rank for rank in range(self._size) if not self._store.check([f"{place}/{rank}"])]
                self._decide(place, f"ranks {absent} did not come within {self.timeout_s:g} s")
            else:
                time.sleep(pause)
                pause = min(2 * pause, limit)
        verdict = self._store.get(_verdict(place)).decode()
        if verdict != _GO:
            raise SyncError(verdict)

    def agree(self, place: str, what: str, value: str) -> None:
        """Aborts unless all ranks that meet at a place post the same value."""
        self._agreed.setdefault(place, []).append(what)
        first = self._store.compare_set(f"{place}/{what}", "", value).decode()
        if first != value:
            self.abort(place, f"{what} {value} differs from another rank's, {first}")

    def forget(self, place: str) -> None:
        """Removes what was posted at a place that all ranks have left: the store would grow with every sync."""
        agreed = self._agreed.pop(place, ())
        shared = ("count", "verdict", *agreed) if self._rank == 0 else ()
        for key in (str(self._rank), *shared):
            self._store.delete_key(f"{place}/{key}")

    def abort(self, place: str, reason: str) -> NoReturn:
        """Decides that the ranks do not go on from a place. The first reason counts, and is what all of them raise.

        Raises:
            SyncError: always.
        """
        raise SyncError(self._decide(place, reason))

    def _decide(self, place: str, reason: str) -> str:
        message = f"sync aborted: rank {self._rank}: {reason}"
        verdict = self._store.compare_set(_verdict(place), "", message).decode()
        return message if verdict == _GO else verdict


def _verdict(place: str) -> str:
    return f"{place}/verdict"
