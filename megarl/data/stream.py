"""Endless, resumable streams of data in a seeded order."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


def stable_hash(*parts: int | str) -> int:
    """Returns a non-negative 63-bit hash that depends on the parts and their order alone."""
    content = hashlib.blake2b(digest_size=8)
    for part in parts:
        encoded = repr(part).encode()
        content.update(len(encoded).to_bytes(8, "little") + encoded)
    return int.from_bytes(content.digest(), "little") >> 1


class Keyed(Protocol):
    """An item with a unique key, and the content by which a resume recognizes changed data."""

    @property
    def key(self) -> str: ...

    @property
    def content(self) -> bytes: ...


@dataclass(frozen=True, kw_only=True)
class StreamState:
    """The position of a stream: item `position` of `epoch`; `digest` identifies data and seed."""

    epoch: int
    position: int
    digest: int


class Stream[T: Keyed]:
    """An endless stream; each epoch has all items, in an order by (seed, epoch) and the keys.

    Raises:
        ValueError: there are no items, or keys repeat.
    """

    def __init__(self, items: Sequence[T], seed: int) -> None:
        if not items:
            raise ValueError("a stream needs at least one item")
        self._items = {item.key: item for item in items}
        if len(self._items) != len(items):
            raise ValueError("the keys of a stream's items must be unique")
        content = [f"{key}:{self._items[key].content.hex()}" for key in sorted(self._items)]
        self._digest = stable_hash(seed, *content)
        self._seed = seed
        self._start(epoch=0, position=0)

    def next(self, count: int) -> list[T]:
        """Returns the next items, from as many epochs as needed."""
        taken: list[T] = []
        while len(taken) < count:
            if self._position == len(self._order):
                self._start(epoch=self._epoch + 1, position=0)
            keys = self._order[self._position : self._position + count - len(taken)]
            taken += [self._items[key] for key in keys]
            self._position += len(keys)
        return taken

    def __getitem__(self, key: str) -> T:
        return self._items[key]

    @property
    def epochs(self) -> float:
        """Number of epochs taken, with fractions."""
        return self._epoch + self._position / len(self._items)

    def state(self) -> StreamState:
        return StreamState(epoch=self._epoch, position=self._position, digest=self._digest)

    def load(self, state: StreamState) -> None:
        """Restores a state; raises ValueError if items or seed are not those of the state."""
        if state.digest != self._digest:
            raise ValueError("the data or the seed are not those of the saved stream; resume with the same ones")
        self._start(epoch=state.epoch, position=state.position)

    def _start(self, *, epoch: int, position: int) -> None:
        self._epoch = epoch
        self._position = position
        self._order = sorted(self._items, key=lambda key: (stable_hash(self._seed, epoch, key), key))
