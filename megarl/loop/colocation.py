"""Whose turn it is: trainers and engines may share devices, and then give them up to each other."""

from __future__ import annotations

from time import perf_counter

from megarl.cluster.engines import RolloutGroup
from megarl.cluster.resharder import Resharder, SyncReport
from megarl.loop.setup import Trainers


class Turns:
    """Hands the devices from the engines to the trainers and back, in the only order that fits into their memory.

    The trainers have the first turn. Engines that sleep start asleep, and drop their weights and their cache whenever
    they fall asleep again. They wake to the weights of a sync, and get their cache when the trainers have offloaded
    what they may. The engines' own state refuses any other order.

    Args:
        trainers: with the actor.
        engines: that generate.
        resharder: from the actor to the engines.
        sleep: the engines sleep in the trainers' turn.
    """

    def __init__(self, trainers: Trainers, engines: RolloutGroup, resharder: Resharder, *, sleep: bool) -> None:
        self._trainers, self._engines, self._resharder = trainers, engines, resharder
        self._sleep, self._of_trainers = sleep, True

    def to_trainers(self) -> None:
        """Ends the engines' turn, if it is theirs; returns when their memory is free."""
        if self._sleep and not self._of_trainers:
            self._engines.sleep()
        self._of_trainers = True

    def to_engines(self, version: int) -> SyncReport:
        """Ends the trainers' turn; returns when the engines have the actor's weights.

        Args:
            version: of the weights; not below the last one.
        """
        assert self._of_trainers, "it is the engines' turn already"
        start = perf_counter()
        if self._sleep:
            self._engines.wake_weights()
        awake = perf_counter()
        report = self._resharder.sync(version)
        synced = perf_counter()
        self._trainers.rest()
        if self._sleep:
            self._engines.wake_cache()
        self._of_trainers = False
        return report.with_offload(awake - start + perf_counter() - synced)

    def back_to_engines(self, version: int) -> None:
        """Ends the trainers' turn, if it is theirs, in which the actor's weights have not changed.

        Engines that slept get them again; others have kept them.

        Args:
            version: of the weights: that of the last sync.
        """
        if self._of_trainers and self._sleep:
            self.to_engines(version)
        elif self._of_trainers:
            self._trainers.rest()
            self._of_trainers = False
