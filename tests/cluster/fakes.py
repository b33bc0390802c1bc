"""Small classes that stand in for workers and engines, to be run in real Ray processes."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing import shared_memory

import numpy as np

from megarl.errors import RunError
from megarl.remote import remote
from megarl.rollout.completions import Response, pack_chunk
from megarl.rollout.engine import RolloutEngine
from megarl.rollout.engine_options import EngineOptions
from megarl.types import RolloutChunk, SampleInfo, VersionSpan, WorkItem


class FakeWorker:
    """A worker whose behaviour the test sets."""

    def __init__(self, config: object, group: str, rank: int) -> None:
        self.group, self.rank = group, rank
        self.calls: list[str] = []

    @remote(phase="update")
    def note(self, name: str, seconds: float = 0.0) -> int:
        time.sleep(seconds)
        self.calls.append(name)
        return self.rank

    @remote(phase="start")
    def tell[T](self, function: Callable[[], T]) -> T:
        """What a function returns in this process."""
        return function()

    @remote(phase="start")
    def noted(self) -> list[str]:
        return self.calls

    @remote(phase="update")
    def column(self, by_rank: Mapping[int, Sequence[int]]) -> tuple[dict[int, np.ndarray], str] | None:
        """Chunk c is c times ones, large enough for the object store."""
        if self.rank not in by_rank:
            return None
        return {chunk: np.full(200_000, chunk) for chunk in by_rank[self.rank]}, f"by {self.rank}"

    @remote(phase="update")
    def means(self, column: Mapping[int, np.ndarray], chunks: Sequence[int]) -> list[float]:
        return [float(column[chunk].mean()) for chunk in chunks]

    @remote(phase="update")
    def fail_on(self, rank: int, others_wait_s: float) -> None:
        if self.rank == rank:
            raise ArithmeticError("the loss is a teapot")
        time.sleep(others_wait_s)

    @remote(phase="checkpoint")
    def fill_the_disk(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device (8 MiB needed, 0 B free)", "run/0.bin")

    @remote(phase="update")
    def fail_for_column(self, rank: int) -> dict[int, np.ndarray]:
        if self.rank == rank:
            raise ArithmeticError("the loss is a teapot")
        return {}

    @remote(phase="update")
    def give_up(self) -> None:
        raise RunError("sync aborted: rank 1: lm_head.weight is missing")

    @remote(phase="update")
    def die_on(self, rank: int) -> None:
        """The rank dies; the others notice a little earlier than the driver, like peers of a connection."""
        if self.rank == rank:
            print("these are my last words", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        raise ConnectionError("connection closed by peer")

    @remote(phase="update")
    def hang_on(self, rank: int) -> None:
        if self.rank == rank:
            print("I sit down", flush=True)
            time.sleep(600)

    @remote(phase="start")
    def litter(self) -> str:
        """Leaves a child process and a shared memory file behind."""
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        self.memory = shared_memory.SharedMemory(create=True, size=1024)
        self.lock = multiprocessing.get_context("spawn").Lock()
        return self.memory.name


OPTIONS = EngineOptions(vocab_size=100, device="cpu")
"""Of engines that do not read them."""


class FakeEngine:
    """Answers every prompt with its own ids.

    A prompt that begins with 99 makes it fail, with 98 ends its process, with 97 takes long; each item takes a while.
    """

    pick, truncate = RolloutEngine.pick, RolloutEngine.truncate

    def __init__(self, model_dir: str, rollout: object, options: object, *, engine_id: int) -> None:
        self.engine_id = engine_id
        self.asked: list[tuple[WorkItem, Future[tuple[dict[int, RolloutChunk], list[SampleInfo]]]]] = []

    @remote(phase="start")
    def start(self) -> int:
        return 2

    @remote(phase="rollout")
    def generate(self, item: WorkItem) -> Future[tuple[dict[int, RolloutChunk], list[SampleInfo]]]:
        self.asked.append((item, Future()))
        return self.asked[-1][1]

    def step(self) -> bool:
        """Answers an item."""
        if self.asked:
            item, answer = self.asked.pop(0)
            begins = {request.prompt.token_ids[0] for request in item.requests}
            time.sleep(6.0 if 97 in begins else 0.02)
            if 98 in begins:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                if 99 in begins:
                    raise ArithmeticError("the prompt is a teapot")
                infos, chunk = self._answer(item)
            except ArithmeticError as error:
                answer.set_exception(error)
            else:
                answer.set_result(({item.chunk: chunk}, infos))
        return bool(self.asked)

    def _answer(self, item: WorkItem) -> tuple[list[SampleInfo], RolloutChunk]:
        responses: list[Response] = []
        for request in item.requests:
            ids = request.prompt.token_ids
            span = VersionSpan(start=0, stop=len(ids), version=0, engine_id=self.engine_id)
            logprobs = [0.0] * len(ids)
            response = Response(request=request, token_ids=ids, logprobs=logprobs, finished=True, versions=(span,))
            responses.append(response)
        return pack_chunk(item.chunk, responses)


class FakeStepper:
    """Works on its calls, one unit of each per step, and records what it runs."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.step_s, self.steps = step_s, 0
        self.left: list[tuple[Future[int], int]] = []
        self.calls: list[str] = []

    @remote(phase="rollout")
    def work(self, units: int) -> Future[int]:
        """Ends after so many steps; its result is their number since the beginning."""
        self.left.append((Future(), units))
        return self.left[-1][0]

    @remote(phase="update")
    def note(self, name: str) -> int:
        """Returns the number of earlier steps."""
        self.calls.append(name)
        return self.steps

    @remote(phase="update")
    def noted(self) -> list[str]:
        return self.calls

    @remote(phase="update")
    def tell[T](self, function: Callable[[], T]) -> T:
        return function()

    @remote(phase="start")
    def start[T](self, function: Callable[[], T]) -> T:
        return function()

    @remote(phase="update")
    def fail(self) -> None:
        raise ArithmeticError("the work is a teapot")

    @remote(phase="rollout")
    def fail_later(self) -> Future[int]:
        return self.work(-1)

    @remote(phase="update")
    def break_steps(self) -> None:
        self.step_s = -1.0

    def step(self) -> bool:
        self.steps += 1
        time.sleep(self.step_s)  # raises ValueError where it is negative
        now, self.left = self.left, []
        for future, units in now:
            if units < 0:
                try:
                    self.fail()
                except ArithmeticError as error:
                    future.set_exception(error)
            elif units <= 1:
                future.set_result(self.steps)
            else:
                self.left.append((future, units - 1))
        return bool(self.left)
