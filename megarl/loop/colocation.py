"""Devices that trainers and engines share, and the version of the weights that the engines have."""

from __future__ import annotations

from time import perf_counter

from megarl.cluster.engines import RolloutGroup
from megarl.cluster.resharder import Resharder, SyncReport
from megarl.cluster.trainers import Trainers


class Colocation:
    """Gives the devices to the trainers or to the engines, in the only order that fits into their memory.

    The trainers have them first. Engines that sleep start asleep and drop their weights and their cache whenever they
    fall asleep. They wake up to receive weights, and get their cache after the trainers have offloaded theirs. The
    engines refuse any other order.

    Args:
        resharder: from the actor to the engines; None where the engines load their weights from files.
        sleep: the engines sleep while the trainers have the devices.
    """

    def __init__(self, trainers: Trainers, engines: RolloutGroup, resharder: Resharder | None, *, sleep: bool) -> None:
        self._trainers, self._engines, self._resharder = trainers, engines, resharder
        self._sleep, self._training = sleep, True
        self._version = 0

    def to_training(self) -> None:
        """Gives the devices to the trainers, unless they have them; waits until the engines' memory is free."""
        if self._sleep and not self._training:
            self._engines.sleep()
        self._training = True

    def to_rollout(self) -> None:
        """Gives the devices to the engines, unless they have them; those that slept get their weights again."""
        if not self._training:
            return
        if self._sleep and self._resharder is not None:
            self.sync()
            return
        self._trainers.offload_all()
        if self._sleep:
            self._engines.wake_weights()
            self._engines.wake_cache()
        self._training = False

    def sync(self, version: int | None = None) -> SyncReport:
        """Moves the actor's weights into the engines, and gives them the devices.

        Args:
            version: of the weights, not below the last one; None: the last one.
        """
        assert self._training, "the engines have the devices already"
        assert self._resharder is not None
        self._version = self._version if version is None else version
        start = perf_counter()
        if self._sleep:
            self._engines.wake_weights()
        awake = perf_counter()
        report = self._resharder.sync(self._version)
        synced = perf_counter()
        self._trainers.offload_all()
        if self._sleep:
            self._engines.wake_cache()
        self._training = False
        return report.with_offload(awake - start + perf_counter() - synced)
