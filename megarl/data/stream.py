"""Endless, resumable streams of data in a seeded order."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


def stable_hash(*parts: int | str) -> int:
    """A non-negative 63-bit number that depends on nothing but the parts and their order."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        encoded = repr(part).encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return int.from_bytes(digest.digest(), "little") >> 1


class Keyed(Protocol):
    """What has a key that is unique in its data set: prompts, demonstrations, pairs."""

    @property
    def key(self) -> str: ...

    @property
    def content(self) -> bytes:
        """What training reads of it: a stream tells by it whether it has the same data as before."""
        ...


T = TypeVar("T", bound=Keyed)


@dataclass(frozen=True, kw_only=True)
class StreamState:
    """Where a stream stands: the next item is number ``position`` of ``epoch``; ``digest`` tells its data and seed."""

    epoch: int
    position: int
    digest: int


class Stream(Generic[T]):
    """An endless stream: every epoch has all items, in an order of its own.

    The order of an epoch depends on (seed, epoch) and the items' keys alone.

    Args:
        items: with unique keys.
        seed: of the run.

    Raises:
        ValueError: no item, or a key twice.
    """

    def __init__(self, items: Sequence[T], seed: int) -> None:
        if not items:
            raise ValueError("a stream needs at least one item")
        self._items = {item.key: item for item in items}
        if len(self._items) != len(items):
            raise ValueError("the keys of a stream's items must be unique")
        self._digest = stable_hash(seed, *(f"{key}:{self._items[key].content.hex()}" for key in sorted(self._items)))
        self._seed = seed
        self._start(epoch=0, position=0)

    def next(self, count: int) -> list[T]:
        """The next items, from as many epochs as it takes."""
        taken: list[T] = []
        while len(taken) < count:
            if self._position == len(self._order):
                self._start(epoch=self._epoch + 1, position=0)
            keys = self._order[self._position : self._position + count - len(taken)]
            taken += [self._items[key] for key in keys]
            self._position += len(keys)
        return taken

    @property
    def epochs(self) -> float:
        """How often all items were taken, parts of an epoch included."""
        return self._epoch + self._position / len(self._items)

    def state(self) -> StreamState:
        """What ``load`` needs to go on from here."""
        return StreamState(epoch=self._epoch, position=self._position, digest=self._digest)

    def load(self, state: StreamState) -> None:
        """Goes on from where ``state`` was taken.

        Raises:
            ValueError: it was taken with other items or another seed.
        """
        if state.digest != self._digest:
            raise ValueError("the data or the seed are not those of the saved stream; resume with the same ones")
        self._start(epoch=state.epoch, position=state.position)

    def _start(self, *, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        self._order = sorted(self._items, key=lambda key: (stable_hash(self._seed, epoch, key), key))
