"""Light workers and engines that end a run in the way and the phase given by their environment."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import numpy as np

from megarl.types import Ragged

CASE, DRIVER = "MEGARL_TEST_CASE", "MEGARL_TEST_DRIVER"
COLLECTIVE = "hang:sync"
"""The case in which the ranks have a world."""
SIGNALS = {"SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM}
WITH_CHILDREN = ("exception:start", "SIGTERM:update")
"""Cases whose ranks have a child, for which the end of the session waits some seconds."""
_BUSY_S = 600.0
_SETTLING_S = 0.5
"""For the answers to earlier calls to arrive, and for the process that watches over shared memory to start."""


def act(phase: str, *, culprit: bool) -> None:
    """Ends as the case says if this is its phase: one process is the cause, the others are busy."""
    ending, _, where = os.environ[CASE].partition(":")
    if where != phase or ending == "normal":
        return
    time.sleep(_SETTLING_S)
    if culprit and ending in SIGNALS:
        os.kill(int(os.environ[DRIVER]), SIGNALS[ending])
    elif culprit and ending == "exception":
        raise ArithmeticError("the loss is a teapot")
    elif culprit and ending == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    elif not culprit and os.environ[CASE] == COLLECTIVE:
        import torch.distributed as dist

        dist.barrier()
    time.sleep(_BUSY_S)


def join_world(rank: int) -> None:
    """Joins the world of two ranks in which the others wait for the cause."""
    import torch.distributed as dist

    file = f"file://{tempfile.gettempdir()}/world"
    dist.init_process_group("gloo", init_method=file, rank=rank, world_size=2)


class Trainer:
    """A rank of the actor, with its own shared memory and temporary file; rank 1 is the cause."""

    def __init__(self, config: object, group: str, rank: int) -> None:
        self.culprit, self.rank = rank == 1, rank
        if os.environ[CASE] in WITH_CHILDREN:
            subprocess.Popen(["sleep", "600"])
        self.memory = shared_memory.SharedMemory(create=True, size=1024)
        (Path(tempfile.gettempdir()) / f"scratch-{rank}").write_text("of a rank")

    def start(self, address: str) -> None:
        act("start", culprit=self.culprit)

    def load(self, model_dir: str) -> None:
        pass

    def logprobs(self, name: str, request: Any) -> dict[int, Ragged]:
        act("inference", culprit=self.culprit)
        return {chunk: Ragged.from_rows([[0.0]], np.float32) for chunk in request.schedule.chunks}

    def update(self, name: str, request: object) -> list[dict[str, float]]:
        act("update", culprit=self.culprit)
        return [{"policy/loss": 0.0}]

    def connect(self, request: object) -> None:
        if os.environ[CASE] == COLLECTIVE:
            join_world(self.rank)

    def send_weights(self, version: int, link: int) -> None:
        act("sync", culprit=self.culprit)

    def save(self, name: str, directory: str) -> None:
        act("checkpoint", culprit=self.culprit)

    def close(self) -> None:
        self.memory.close()
        self.memory.unlink()


class Engine:
    """An engine that answers nothing."""

    def __init__(self, model_dir: str, *args: object, engine_id: int) -> None:
        pass

    def start(self) -> int:
        return 1

    def step(self) -> bool:
        return False

    def connect(self, request: object) -> None:
        pass

    def generate(self, item: object) -> None:
        act("rollout", culprit=True)

    def receive_weights(self, version: int) -> list[Any]:
        from megarl.resharding import SyncStats

        return [SyncStats(version=version)]

    def close(self) -> None:
        pass
