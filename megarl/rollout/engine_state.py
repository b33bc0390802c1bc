"""What an engine may be asked next: which weights it has, and what of it is in its devices' memory."""

from __future__ import annotations

from enum import Enum


class Memory(Enum):
    """What of an engine is in memory."""

    AWAKE = "awake"
    ASLEEP = "asleep"
    WEIGHTS = "awake but for its cache"


class Weights(Enum):
    """What the weights are."""

    NONE = "has no weights yet: sync it once before using it"
    DROPPED = "dropped its weights when it went to sleep: sync it before using it"
    MIXED = "has the weights of two versions: a weight sync failed half-way; sync again before using it"
    WHOLE = "has weights"


class EngineState:
    """Follows an engine and refuses what is out of order: sleep, wake_weights, sync, wake_cache.

    That order lets trainers and engines share devices: an engine that sleeps holds neither weights nor cache, and takes
    new weights before its cache needs the room in which they were staged.

    Args:
        engine_id: for messages.
        sleeps: whether it gives its memory up between the rollouts; it starts asleep then.
        drops: whether its weights are gone after a sleep, because a sync brings others.
        version: of the weights that it starts with; None where it has none.
    """

    def __init__(self, engine_id: int, *, sleeps: bool, drops: bool, version: int | None) -> None:
        self.version = version
        self._name = f"engine {engine_id}"
        self._sleeps, self._drops = sleeps, drops
        self._memory = Memory.ASLEEP if sleeps else Memory.AWAKE
        self._weights = Weights.NONE if version is None else Weights.WHOLE

    def usable_version(self) -> int:
        """The version of the weights that answers come from.

        Raises:
            RuntimeError: it has no whole weights, or is not awake.
        """
        self._need("answer", Memory.AWAKE)
        return self._whole()

    def sleep(self) -> None:
        """It gives its weights and its cache up."""
        self._need("sleep", Memory.AWAKE, moves=True)
        self._memory = Memory.ASLEEP
        if self._drops and self._weights is not Weights.NONE:
            self._weights = Weights.DROPPED

    def wake_weights(self) -> None:
        """Its weights have memory again; where they come by sync, there is nothing in it."""
        self._need("wake_weights", Memory.ASLEEP, moves=True)
        self._memory = Memory.WEIGHTS

    def wake_cache(self) -> None:
        """Its cache has memory again: it is awake."""
        self._need("wake_cache", Memory.WEIGHTS, moves=True)
        self._whole()
        self._memory = Memory.AWAKE

    def begin_sync(self) -> None:
        """Weights may be written."""
        self._need("sync", Memory.WEIGHTS if self._sleeps else Memory.AWAKE)

    def commit(self, version: int) -> None:
        """The weights are those of a version, all of them."""
        self.version, self._weights = version, Weights.WHOLE

    def mix(self) -> None:
        """Some weights are of another version."""
        self._weights = Weights.MIXED

    def _need(self, action: str, memory: Memory, *, moves: bool = False) -> None:
        """Raises RuntimeError unless that is what is in memory."""
        if moves and not self._sleeps:
            raise RuntimeError(f"{self._name} cannot {action}: rollout.sleep is false, so that it stays awake")
        if self._memory is not memory:
            raise RuntimeError(
                f"{self._name} cannot {action} while it is {self._memory.value}, only while it is {memory.value}: "
                "the order is sleep, wake_weights, sync, wake_cache"
            )

    def _whole(self) -> int:
        if self._weights is not Weights.WHOLE:
            raise RuntimeError(f"{self._name} {self._weights.value}")
        assert self.version is not None
        return self.version
