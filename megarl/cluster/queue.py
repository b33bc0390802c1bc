"""Work that processes share out among themselves: whoever has time takes the next item."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Generic, TypeVar

from megarl.cluster.session import Session
from megarl.cluster.shell import ChunkRefs

T = TypeVar("T")
_TIMEOUT = timedelta(seconds=60)


class Offer(Generic[T]):
    """Items to take. Each goes to one process, in their order; iterating takes the next one each time.

    It is sent to the processes: an item is fetched by whoever takes it. Nobody waits: what a counter in the driver's
    store says is what comes next.

    Args:
        address: host and port of the store.
        key: of the counter.
        items: by their place in the order.
    """

    def __init__(self, address: tuple[str, int], key: str, items: ChunkRefs[T]) -> None:
        self._address = address
        self._key = key
        self._items = items

    def __iter__(self) -> Iterator[T]:
        # Here, because a process may have to set its environment up before it imports torch.
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  (public by documentation)

        host, port = self._address
        store = TCPStore(host, port, is_master=False, timeout=_TIMEOUT)
        while (index := store.add(self._key, 1) - 1) < len(self._items):
            yield self._items[index]


class WorkQueue:
    """The driver's end: the store with the counters, at which the processes of the session can reach it.

    Args:
        session: of the run.
    """

    def __init__(self, session: Session) -> None:
        from megarl.resharding import serve_store

        self._session = session
        self._store = serve_store(session.host)
        self._offers = itertools.count()

    def offer(self, items: Sequence[T]) -> Offer[T]:
        """Offers items; they exist as long as the offer does."""
        key = f"offer {next(self._offers)}"
        return Offer((self._session.host, self._store.port), key, self._session.share(items))
