"""The states of an engine: the version of its weights, and its memory on the devices."""

from __future__ import annotations

from enum import Enum


class EngineMemory(Enum):
    AWAKE = "awake"
    ASLEEP = "asleep"
    WEIGHTS = "awake but for its cache"


class WeightState(Enum):
    """The state of the weights, as the end of a message."""

    NONE = "has no weights yet: sync it once before using it"
    DROPPED = "dropped its weights when it went to sleep: sync it before using it"
    MIXED = "has the weights of two versions: a weight sync failed half-way; sync again before using it"
    WHOLE = "has weights"


class EngineState:
    """Refuses an engine's calls that are out of order: sleep, wake_weights, sync, wake_cache.

    In this order trainers and engines can share devices: a sleeping engine holds neither weights
    nor cache, and receives new weights before it allocates its cache.

    Args:
        sleeps: whether the engine releases its memory between rollouts, and starts asleep.
        drops: whether sleep drops the weights, because a sync brings new ones.
        version: version of the initial weights; None without weights.
        overlaps: whether weights may change while responses are in progress.
    """

    def __init__(
        self,
        engine_id: int,
        *,
        sleeps: bool,
        drops: bool,
        version: int | None,
        overlaps: bool = False,
    ) -> None:
        self.version = version
        self._name = f"engine {engine_id}"
        self._sleeps = sleeps
        self._drops = drops
        self._overlaps = overlaps
        self._memory = EngineMemory.ASLEEP if sleeps else EngineMemory.AWAKE
        self._weights = WeightState.NONE if version is None else WeightState.WHOLE

    @property
    def mixed(self) -> bool:
        """Whether the weights are of several versions, which a sync has to replace."""
        return self._weights is WeightState.MIXED

    def usable_version(self) -> int:
        """Returns the weights' version; raises RuntimeError if they are not complete, or the engine not awake."""
        self._require("answer", EngineMemory.AWAKE)
        return self._whole()

    def sleep(self, in_progress: int = 0) -> None:
        """Goes to sleep; raises RuntimeError if responses are in progress."""
        self._require("sleep", EngineMemory.AWAKE, moves=True)
        self._require_idle("sleep", in_progress)
        self._memory = EngineMemory.ASLEEP
        if self._drops and self._weights is not WeightState.NONE:
            self._weights = WeightState.DROPPED

    def wake_weights(self) -> None:
        self._require("wake_weights", EngineMemory.ASLEEP, moves=True)
        self._memory = EngineMemory.WEIGHTS

    def wake_cache(self) -> None:
        self._require("wake_cache", EngineMemory.WEIGHTS, moves=True)
        self._whole()
        self._memory = EngineMemory.AWAKE

    def begin_sync(self, in_progress: int = 0) -> None:
        """Allows weights to be written; raises RuntimeError if responses are in progress that must not see it."""
        memory = EngineMemory.WEIGHTS if self._sleeps else EngineMemory.AWAKE
        self._require("sync", memory)
        if not self._overlaps:
            self._require_idle("sync", in_progress)

    def commit(self, version: int) -> None:
        self.version = version
        self._weights = WeightState.WHOLE

    def mix(self) -> None:
        """Records that the weights are of several versions."""
        self._weights = WeightState.MIXED

    def _require(self, action: str, memory: EngineMemory, *, moves: bool = False) -> None:
        if moves and not self._sleeps:
            rule = "rollout.sleep is false, so that it stays awake"
            raise RuntimeError(f"{self._name} cannot {action}: {rule}")
        if self._memory is not memory:
            states = f"while it is {self._memory.value}, only while it is {memory.value}"
            order = "the order is sleep, wake_weights, sync, wake_cache"
            raise RuntimeError(f"{self._name} cannot {action} {states}: {order}")

    def _require_idle(self, action: str, in_progress: int) -> None:
        if in_progress:
            fix = "wait for them first; only rollout.mode inflight syncs in between"
            raise RuntimeError(f"{self._name} cannot {action} with {in_progress} responses in progress: {fix}")

    def _whole(self) -> int:
        if self._weights is not WeightState.WHOLE:
            raise RuntimeError(f"{self._name} {self._weights.value}")
        assert self.version is not None
        return self.version
