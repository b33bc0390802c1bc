"""Endless, resumable streams of data in a seeded order."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
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


class Stream[T: Keyed]:
    """An endless stream; each epoch has all items, in an order by (seed, epoch) and the keys."""

    def __init__(self, items: Sequence[T], seed: int) -> None:
        self._items = {item.key: item for item in items}
        assert len(self._items) == len(items) > 0, "a stream needs items with unique keys"
        content = [f"{key}:{self._items[key].content.hex()}" for key in sorted(self._items)]
        self._digest = stable_hash(seed, *content)
        self._seed = seed
        self._start(0, 0)

    def next(self, count: int) -> list[T]:
        """Returns the next items, from as many epochs as needed."""
        taken: list[T] = []
        while len(taken) < count:
            if self._position == len(self._order):
                self._start(self._epoch + 1, 0)
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

    def state(self) -> dict[str, int]:
        """Returns the number of the next item in its epoch, and a digest of data and seed."""
        return {"epoch": self._epoch, "position": self._position, "digest": self._digest}

    def load(self, state: Mapping[str, int]) -> None:
        """Restores a state; raises ValueError if items or seed are not those of the state."""
        if state["digest"] != self._digest:
            raise ValueError("the data or the seed are not those of the saved stream; resume with the same ones")
        self._start(state["epoch"], state["position"])

    def _start(self, epoch: int, position: int) -> None:
        self._epoch = epoch
        self._position = position
        self._order = sorted(self._items, key=lambda key: (stable_hash(self._seed, epoch, key), key))
