"""Trainers and engines that use the real transport; a file can make an engine die or hang."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megarl.models import model_spec
from megarl.resharding import ConnectRequest, Receiver, Sender, SyncStats, connect
from megarl.stages.ppo.config import PPOConfig

_STUCK_S = 600.0
_LATE_LOAD = 3


class Trainer:
    """A rank of the actor; all elements of its parameters are the version that it sends."""

    def __init__(self, config: PPOConfig, group: str, rank: int) -> None:
        shard_map = model_spec(config.model.hf_config()).megatron_map(config.layout("actor"), rank)
        self._params = {
            name: torch.empty(info.shape, dtype=getattr(torch, info.dtype)) for name, info in shard_map.params.items()
        }
        self._senders: dict[int, Sender] = {}

    def connect(self, request: ConnectRequest) -> None:
        self._senders.pop(request.link, None)
        (rank,) = request.ranks
        self._senders[request.link] = Sender(connect(request.sync, rank), self._params)

    def send_weights(self, version: int, link: int) -> SyncStats:
        for tensor in self._params.values():
            tensor.fill_(version)
        return self._senders[link].send(version)


class Engine:
    """An engine that keeps the values of its parameters.

    Args:
        model_dir: of files with faults, by number of the engine: where it happens and what. It happens once.
    """

    def __init__(self, model_dir: str, rollout: object, options: object, *, engine_id: int) -> None:
        self._fault = Path(model_dir) / str(engine_id)
        self._values: dict[str, set[float]] = {}
        self._loads = 0
        self._armed = False
        self._receiver: Receiver

    def start(self) -> int:
        return 1

    def step(self) -> bool:
        if self._armed:
            self._strike("step")
        return False

    def connect(self, request: ConnectRequest) -> None:
        self._strike("connect")
        (rank,) = request.ranks
        self._receiver = Receiver(connect(request.sync, rank), self._load)

    def receive_weights(self, version: int) -> list[SyncStats]:
        self._strike("begin")
        self._loads = 0
        stats = self._receiver.receive(version)
        self._strike("commit")
        return [stats]

    def values(self) -> set[float]:
        """All values of all parameters, but for the zeros of padding; a fault in a step happens in the one after it."""
        self._armed = self._fault.exists()
        return set[float]().union(*self._values.values()) - {0.0}

    def _load(self, params: Mapping[str, torch.Tensor], box: Any) -> None:
        self._loads += 1
        if self._loads == _LATE_LOAD:
            self._strike("load")
        self._values.update({name: set(tensor.unique().tolist()) for name, tensor in params.items()})

    def _strike(self, where: str) -> None:
        if not self._fault.exists() or self._fault.read_text().split()[0] != where:
            return
        _, what = self._fault.read_text().split()
        self._fault.unlink()
        if what == "stuck":
            time.sleep(_STUCK_S)
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[what])
