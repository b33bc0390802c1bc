"""Syncs from real Megatron ranks, in processes of the pool, into a real engine; and their faults."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.config import RunConfig, load
from megarl.models import model_spec
from megarl.resharding import ConnectRequest, SyncError, SyncSpec, SyncStats, serve_store
from megarl.resharding.spec import plan_sync
from megarl.types import Layout
from megarl.weights.hf_files import read_config
from megarl.weights.plan import TransferPlan
from megarl.weights.planner import Place
from tests.pool import RankPool, free_port
from tests.resharding.jobs import count_put
from tests.rollout.engine_process import EngineProcess, RemoteError

if TYPE_CHECKING:
    from megarl.megatron.worker import MegatronWorker

DEBUG = "configs/debug/ppo.yaml"
ACTOR = "groups.train.roles.actor"
TRAINERS = 4
BUCKET_BYTES = 1 << 16

Fault = Callable[["MegatronWorker"], None]
"""Happens to a trainer rank before its part of a sync; at the top of a module."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A sync.

    Args:
        version: of the weights.
        faults: by trainer rank.
    """

    version: int
    faults: Mapping[int, Fault] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The ranks' results of a sync: each its statistics, or the error that it raised.

    Args:
        trainers: by rank; None of one that died.
        written: by trainer rank: bytes put into the memory of each engine rank, over this connection.
        engine: what its ranks counted, or the error of all.
    """

    trainers: Sequence[SyncStats | str | None]
    written: Sequence[Mapping[int, int]]
    engine: list[SyncStats] | str

    def error(self) -> str:
        """The error message, which all surviving ranks share."""
        said = {str(told) for told in self.trainers if told is not None}
        assert len(said) == 1, said
        message = said.pop()
        assert message.startswith("sync aborted: rank "), message
        assert f"SyncError: {message}" in self.engine, self.engine
        return message


def plan_of(overrides: Sequence[str], directory: Path, places: Sequence[Place]) -> TransferPlan:
    """The plan from a layout of the actor to an engine; the trainers' places come first."""
    layout: Layout = _config(overrides, directory).layout("actor")
    engine = places[TRAINERS:]
    spec = model_spec(read_config(directory))
    return plan_sync(spec, layout, places[:TRAINERS], len(engine), engine, BUCKET_BYTES)


def sync(
    pool: RankPool,
    process: EngineProcess,
    overrides: Sequence[str],
    directory: Path,
    *steps: Step,
    places: Sequence[Place],
    transport: str = "auto",
    during: Callable[[], None] = lambda: None,
) -> list[Outcome]:
    """Loads a model into the actor's ranks, connects them with the engine, and syncs.

    Args:
        overrides: of the debug configuration.
        directory: of the model.
        places: of the trainers' ranks, then the engine's.
        during: called here while the first sync is under way.
    """
    store, engine = serve_store(), range(TRAINERS, len(places))
    spec = SyncSpec.of(
        plan_of(overrides, directory, places),
        name="test",
        host="localhost",
        port=store.port,
        places=places,
        transport=transport,  # pyright: ignore[reportArgumentType]
        timeout_s=100,
    )
    dying = [rank for step in steps for rank, fault in step.faults.items() if fault is die]
    arguments = (list(overrides), free_port(), directory, spec, steps)
    with ThreadPoolExecutor(1) as executor:
        sending = executor.submit(pool.run, _send, *arguments, world_size=TRAINERS, connected=False, dying=dying)
        try:
            process.call("connect", ConnectRequest(sync=spec.only(engine), ranks=engine))
        except RemoteError:
            sending.result()  # where a trainer's rank failed, that is the reason
            raise
        received: list[Any] = []
        for step in steps:
            process.begin_call("receive_weights", step.version)
            if not received:
                during()
            try:
                received.append(process.end())
            except RemoteError as error:
                received.append(str(error))
        sent = sending.result()
    return [
        Outcome(
            trainers=[None if told is None else told[0][i] for told in sent],
            written=[{} if told is None else told[1] for told in sent],
            engine=received[i],
        )
        for i in range(len(steps))
    ]


def _config(overrides: Sequence[str], directory: Path) -> RunConfig:
    functions = "reward.functions=[{name: soft_overlong, args: {max_tokens: 32, buffer_tokens: 32}}]"
    given = ["model.random=null", f"model.path={directory}", "groups.train.roles.reward=null", functions]
    return load(DEBUG, [*given, *overrides])


def _send(
    rank: int, overrides: list[str], port: int, directory: Path, spec: SyncSpec, steps: Sequence[Step]
) -> tuple[list[SyncStats | str], dict[int, int]]:
    """A Megatron rank that loads a model and takes part in syncs."""
    from megarl.megatron.worker import MegatronWorker

    worker = MegatronWorker(_config(overrides, directory), "train", rank)
    worker.start(f"tcp://127.0.0.1:{port}")
    worker.load(str(directory))
    worker.connect(ConnectRequest(sync=spec.only([rank]), ranks=[rank]))
    connection, _ = worker._senders[0]
    written = count_put(connection)
    told: list[SyncStats | str] = []
    for step in steps:
        step.faults.get(rank, _nothing)(worker)
        try:
            told.append(worker.send_weights(step.version))
        except SyncError as error:
            told.append(str(error))
    worker.close()
    return told, dict(written)


def _nothing(worker: MegatronWorker) -> None:
    pass


def lose_a_tensor(worker: MegatronWorker) -> None:
    """The last parameter of the rank is missing."""
    _, sender = worker._senders[0]
    tensors = dict(sender._params)
    tensors.popitem()
    sender._params = tensors


def corrupt(worker: MegatronWorker) -> None:
    """A byte of the rank's third message changes after its checksum was made."""
    _at_message(3, lambda targets: targets[-1].view(-1).view(dtype=_bytes())[:1].bitwise_xor_(1))


def die(worker: MegatronWorker) -> None:
    """The rank's process is killed when its third message is under way."""
    _at_message(3, lambda _: os.kill(os.getpid(), signal.SIGKILL))


@dataclass(frozen=True, kw_only=True)
class Pause:
    """The rank waits before its third message.

    Args:
        begun: file that it makes then.
        over: file that ends it.
    """

    begun: Path
    over: Path

    def __call__(self, worker: MegatronWorker) -> None:
        _at_message(3, self._wait)

    def _wait(self, _targets: object) -> None:
        self.begun.touch()
        while not self.over.exists():
            time.sleep(0.01)


def _bytes() -> Any:
    import torch

    return torch.uint8


def _at_message(number: int, happen: Callable[[Sequence[Any]], object]) -> None:
    """Calls a function once, after this process has written the given message."""
    from megarl.resharding import sync_rank

    pack, count = sync_rank.pack, 0

    def counted(message: Any, params: Any, targets: Sequence[Any], checksum: Any) -> None:
        nonlocal count
        pack(message, params, targets, checksum)
        count += 1
        if count == number:
            sync_rank.pack = pack
            happen(targets)

    sync_rank.pack = counted
