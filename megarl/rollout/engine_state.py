"""The states of an engine: the version of its weights, and its memory on the devices."""

from __future__ import annotations

_NONE = "has no weights yet: sync it once before using it"
_DROPPED = "dropped its weights when it went to sleep: sync it before using it"
_MIXED = "has the weights of two versions: a weight sync failed half-way; sync again before using it"
_WHOLE = "has weights"

_AWAKE = "awake"
_ASLEEP = "asleep"
_WEIGHTS = "awake but for its cache"


class EngineState:
    """Refuses an engine's calls that are out of order, with RuntimeError: sleep, wake_weights, sync, wake_cache.

    In this order trainers and engines can share devices: a sleeping engine holds neither weights
    nor cache, and receives new weights before it allocates its cache.

    Args:
        sleeps: whether the engine releases its memory between rollouts, and starts asleep.
        drops: whether sleep drops the weights, because a sync brings new ones.
        version: version of the initial weights; None without weights.
        overlaps: whether weights may change while responses are in progress.
    """

    def __init__(
        self, engine_id: int, *, sleeps: bool, drops: bool, version: int | None, overlaps: bool = False
    ) -> None:
        self.version = version
        self._name = f"engine {engine_id}"
        self._sleeps = sleeps
        self._drops = drops
        self._overlaps = overlaps
        self._memory = _ASLEEP if sleeps else _AWAKE
        self._weights = _NONE if version is None else _WHOLE

    @property
    def mixed(self) -> bool:
        """Whether the weights are of several versions, which a sync has to replace."""
        return self._weights is _MIXED

    def usable_version(self) -> int:
        """Returns the weights' version, if they are complete and the engine is awake."""
        self._require("answer", _AWAKE)
        return self._whole()

    def sleep(self, in_progress: int = 0) -> None:
        self._require("sleep", _AWAKE, moves=True)
        self._require_idle("sleep", in_progress)
        self._memory = _ASLEEP
        if self._drops and self._weights is not _NONE:
            self._weights = _DROPPED

    def wake_weights(self) -> None:
        self._require("wake_weights", _ASLEEP, moves=True)
        self._memory = _WEIGHTS

    def wake_cache(self) -> None:
        self._require("wake_cache", _WEIGHTS, moves=True)
        self._whole()
        self._memory = _AWAKE

    def begin_sync(self, in_progress: int = 0) -> None:
        """Allows weights to be written."""
        self._require("sync", _WEIGHTS if self._sleeps else _AWAKE)
        if not self._overlaps:
            self._require_idle("sync", in_progress)

    def commit(self, version: int) -> None:
        self.version = version
        self._weights = _WHOLE

    def mix(self) -> None:
        """Records that the weights are of several versions."""
        self._weights = _MIXED

    def _require(self, action: str, memory: str, *, moves: bool = False) -> None:
        if moves and not self._sleeps:
            raise RuntimeError(f"{self._name} cannot {action}: rollout.sleep is false, so that it stays awake")
        if self._memory is not memory:
            states = f"while it is {self._memory}, only while it is {memory}"
            order = "the order is sleep, wake_weights, sync, wake_cache"
            raise RuntimeError(f"{self._name} cannot {action} {states}: {order}")

    def _require_idle(self, action: str, in_progress: int) -> None:
        if in_progress:
            fix = "wait for them first; only rollout.mode inflight syncs in between"
            raise RuntimeError(f"{self._name} cannot {action} with {in_progress} responses in progress: {fix}")

    def _whole(self) -> int:
        if self._weights is not _WHOLE:
            raise RuntimeError(f"{self._name} {self._weights}")
        assert self.version is not None
        return self.version
