"""A trainer of one rank, in the tests' process, that holds a whole model and syncs it into an engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarl.resharding import Place, Sender, SyncError, SyncSpec, SyncStats, connect, serve_store
from megarl.resharding.transport import Transfer
from megarl.weights.files import HFDirectory
from megarl.weights.planner import Holder, plan
from tests.rollout.engine_process import EngineProcess, RemoteError

BUCKET_BYTES = 1 << 17  # the tiny models arrive in several buckets


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the ranks of the engine and the trainer counted."""

    received: list[SyncStats]
    sent: SyncStats


class Trainer:
    """Holds all tensors of a directory and is connected with an engine.

    Args:
        process: hosts the engine.
        model_dir: whose tensors are sent.
    """

    def __init__(self, process: EngineProcess, model_dir: Path) -> None:
        self._process = process
        shards = process.call("shard_maps")
        engines = [Holder(rank=1 + rank, map=shard) for rank, shard in enumerate(shards)]
        self.plan = plan([Holder(rank=0, map=HFDirectory(model_dir).map)], engines, BUCKET_BYTES)
        self._store = serve_store()
        ranks = range(1, 1 + len(shards))
        spec = SyncSpec.of(
            self.plan,
            name="test",
            host="localhost",
            port=self._store.port,
            places=[Place() for _ in (0, *ranks)],
            timeout_s=20,
        )
        process.begin_call("connect", spec.only(ranks), ranks)
        connection = connect(spec, 0)
        process.end()
        self._control = connection.control
        self._sender = Sender(connection, load_file(model_dir / "model.safetensors"))

    def sync(self, version: int) -> Report:
        """Sends the weights; both sides commit the version."""
        self._process.begin_call("receive_weights", version)
        sent = self._sender.send(version)
        return Report(received=self._process.end(), sent=sent)

    def fail_to_sync(self, version: int, *, corrupt_bucket: int | None = None, reason: str) -> None:
        """Does the same, expecting that both sides abort for this reason.

        Args:
            corrupt_bucket: the checksum that the sender says of it is not that of what has landed.
        """
        send = self._control.send

        def corrupt(peer: int, tag: int, numbers: torch.Tensor) -> Transfer:
            _version, bucket, _nbytes, checksum = numbers
            if bucket == corrupt_bucket:
                checksum ^= 1
            return send(peer, tag, numbers)

        self._control.send = corrupt
        self._process.begin_call("receive_weights", version)
        with pytest.raises(SyncError, match=reason):
            self._sender.send(version)
        with pytest.raises(RemoteError, match=reason):
            self._process.end()


def sync(process: EngineProcess, model_dir: Path, version: int) -> Report:
    """Connects a trainer with the directory's weights and syncs once."""
    return Trainer(process, model_dir).sync(version)
