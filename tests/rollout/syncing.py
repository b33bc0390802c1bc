"""Trainer ranks, as threads of the tests' process, that hold a model in a Megatron layout and sync it into engines."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megarl.models import model_spec
from megarl.resharding import Connection, ConnectRequest, Sender, SyncError, SyncSpec, SyncStats, connect, serve_store
from megarl.resharding.buckets import bucket_views
from megarl.resharding.connection import MessageReady
from megarl.resharding.spec import plan_sync
from megarl.types import Layout
from megarl.weights.hf_files import read_config
from megarl.weights.planner import Place
from tests.resharding.jobs import Spied
from tests.rollout import in_process
from tests.rollout.conftest import Answers, ask, start
from tests.rollout.engine_process import EngineProcess, RemoteError
from tests.weights.models import placed

ONE_RANK = Layout()
BUCKET_BYTES = 1 << 17  # the tiny models arrive in several buckets


@dataclass(frozen=True, kw_only=True)
class Report:
    """The statistics of the engine's and the trainer's ranks."""

    received: list[SyncStats]
    sent: list[SyncStats]


class Trainer:
    """Holds all tensors of a directory and is connected with an engine.

    Args:
        process: hosts the engine.
        model_dir: whose tensors are sent.
        layout: in which they are held.
        device: cpu; or cuda, whose first GPU one trainer shares with the engine's first rank.
    """

    def __init__(
        self, process: EngineProcess, model_dir: Path, layout: Layout = ONE_RANK, *, device: str = "cpu"
    ) -> None:
        spec, first = model_spec(read_config(model_dir)), layout.world_size
        tp = len(process.call("shard_maps"))
        self._process, self._device = process, device
        gpus = [Place(device=gpu if device == "cuda" else None) for gpu in range(tp)]
        trainers = [gpus[0]] * first
        self.plan = plan_sync(spec, layout, trainers, tp, gpus, BUCKET_BYTES)
        self._store = serve_store()
        self._sync = SyncSpec.of(
            self.plan,
            name="test",
            host="localhost",
            port=self._store.port,
            places=[*trainers, *gpus],
            device=device,
            timeout_s=120,
        )
        ranks = range(first, first + tp)
        process.begin_call("connect", ConnectRequest(sync=self._sync.only(ranks), ranks=ranks))
        self._threads = ThreadPoolExecutor(first)
        self._connections = list(self._threads.map(self._connect, range(first)))
        process.end()
        tensors = load_file(model_dir / "model.safetensors", device=device)
        self._senders = [
            Sender(connection, placed(tensors, spec.megatron_map(layout, rank)))
            for rank, connection in enumerate(self._connections)
        ]

    def sync(self, version: int) -> Report:
        """Sends the weights; both sides commit the version."""
        self._process.begin_call("receive_weights", version)
        sending = [self._threads.submit(sender.send, version) for sender in self._senders]
        return Report(received=self._process.end(), sent=[rank.result() for rank in sending])

    def fail_to_sync(self, version: int, *, corrupt: tuple[int, int] | None = None, reason: str) -> None:
        """Tries to sync, expecting that both sides abort for this reason.

        Args:
            corrupt: a tensor-parallel rank of the engine and a bucket; a byte that rank 0 has written for it changes.
        """
        if corrupt is not None:
            receiver, bucket = len(self._senders) + corrupt[0], corrupt[1]
            connection = self._connections[0]

            def change(_count: int, peer: int, numbers: torch.Tensor) -> None:
                """Before the message that a bucket is ready, changes a byte of the bucket."""
                if peer == receiver and MessageReady(*numbers.tolist()).bucket == bucket:
                    views = bucket_views(connection.mapped[peer], connection.spec.recv_buffers[peer], bucket)
                    next(iter(views.values())).view(torch.uint8).view(-1)[0] ^= 1

            connection.control = Spied(connection.control, before=change)
        self._process.begin_call("receive_weights", version)
        for sending in [self._threads.submit(sender.send, version) for sender in self._senders]:
            with pytest.raises(SyncError, match=reason):
                sending.result()
        with pytest.raises(RemoteError, match=reason):
            self._process.end()

    def _connect(self, rank: int) -> Connection:
        return connect(self._sync.only([rank]), rank, self._device)


def sync(process: EngineProcess, model_dir: Path, version: int, layout: Layout = ONE_RANK) -> Report:
    """Connects trainers with the directory's weights and syncs once."""
    return Trainer(process, model_dir, layout).sync(version)


def check_sleep(process: EngineProcess, model_dir: Path, *, tp: int = 1, device: str = "cpu") -> Answers:
    """An engine that sleeps, wakes and receives the same weights gives the same answers; on GPUs, it frees memory.

    Returns the answers.
    """
    cache_mib = 1024 if device == "cuda" else 16
    start(process, model_dir, tp=tp, device=device, sleep=True, kv_cache_mib=cache_mib)
    trainer = Trainer(process, model_dir, device=device)

    def wake() -> Answers:
        process.call("wake_weights")
        trainer.sync(1)
        process.call("wake_cache")
        return ask(process)

    def free() -> list[int]:
        return [process.apply(in_process.free_bytes, gpu) for gpu in range(tp)] if device == "cuda" else []

    before, awake = wake(), free()
    process.call("sleep")
    freed = [asleep - used for asleep, used in zip(free(), awake, strict=True)]
    after = wake()
    assert all(nbytes > 0.9 * cache_mib * 2**20 for nbytes in freed), freed
    for name in ("response_ids", "rollout_logprobs"):
        np.testing.assert_array_equal(getattr(after.chunk, name).values, getattr(before.chunk, name).values, name)
    return after
