"""Devices that trainers and engines share."""

from __future__ import annotations

from time import perf_counter

from megarl.groups.engines import RolloutGroup
from megarl.groups.resharder import Resharder, SyncReport
from megarl.groups.trainers import Trainers
from megarl.remote import RemoteMethod
from megarl.rollout.engine import RolloutEngine


class Colocation:
    """Gives shared devices to the trainers or to the engines, and remembers the version of the engines' weights.

    The trainers have the devices first. Sleeping engines hold neither weights nor a cache: they
    wake up to receive weights, and get their cache after the trainers have been offloaded. The
    engines refuse any other order. Where the engines have devices of their own, both
    sides keep theirs.

    Args:
        resharder: None if the engines read their weights from files.
        sleep: engines sleep while the trainers have the devices.
        shared: trainers and engines share devices.
    """

    def __init__(
        self,
        trainers: Trainers,
        engines: RolloutGroup,
        resharder: Resharder | None,
        *,
        sleep: bool,
        shared: bool = True,
    ) -> None:
        self._trainers = trainers
        self.engines = engines
        self._resharder = resharder
        self._sleep = sleep
        self.shared = shared
        self._training = True
        self._version = 0

    async def to_training(self) -> None:
        """Gives the devices to the trainers, unless they have them."""
        if not self._training and self.shared:
            await self._call_if_sleeping(RolloutEngine.sleep)
        self._training = True

    async def to_rollout(self) -> None:
        """Gives the devices to the engines, unless they have them; engines that slept get their weights."""
        if not self._training or not self.shared:
            return
        if self._sleep and self._resharder is not None:
            await self.sync()
            return
        await self._trainers.offload_all()
        await self._call_if_sleeping(RolloutEngine.wake_weights)
        await self._call_if_sleeping(RolloutEngine.wake_cache)
        self._training = False

    async def sync(self, version: int | None = None) -> SyncReport:
        """Moves the actor's weights into the engines as `version`, or the last version, and gives them the devices."""
        assert self._training or not self.shared, "the engines have the devices already"
        assert self._resharder is not None
        self._version = self._version if version is None else version
        start = perf_counter()
        await self._call_if_sleeping(RolloutEngine.wake_weights)
        awake = perf_counter()
        report = await self._resharder.sync(self._version)
        synced = perf_counter()
        if self.shared:
            await self._trainers.offload_all()
        await self._call_if_sleeping(RolloutEngine.wake_cache)
        self._training = False
        report.add_stage("offload", awake - start + perf_counter() - synced)
        return report

    async def _call_if_sleeping(self, method: RemoteMethod[RolloutEngine, [], None]) -> None:
        if self._sleep:
            await self.engines.call(method)
