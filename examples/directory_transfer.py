"""A way to move weights through a directory that trainers and engines share; each message is a file."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from megarl.resharding import WeightTransfer
from megarl.resharding.buckets import payload, unpack
from megarl.resharding.transfers.transfer import Write
from megarl.weights.plan import Message

PARENT = Path("transfers")
"""Below the working directory, which all processes of a run share."""


class DirectoryTransfer(WeightTransfer):
    """Writes each message to a file, which its receiver reads and removes."""

    _directory: Path | None = None

    def connect(self) -> None:
        """Agrees on a new directory, which the first rank that moves messages makes."""
        barrier = self.connection.barrier
        if self.connection.rank == self.connection.spec.wire[0]:
            PARENT.mkdir(exist_ok=True)
            barrier.post("directory", tempfile.mkdtemp(dir=PARENT.absolute()))
        self._directory = Path(barrier.read("directory"))

    def send(self, message: Message, write: Write) -> None:
        frame = torch.empty(message.nbytes, dtype=torch.uint8, device=self.connection.device)
        write(payload(message, frame))
        self._path(message).write_bytes(frame.cpu().numpy().data)

    def receive(self, message: Message, targets: Sequence[torch.Tensor]) -> None:
        path = self._path(message)
        frame = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
        unpack(message, frame.to(self.connection.device), targets)
        path.unlink()

    def abort(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def close(self) -> None:
        self.abort()

    def _path(self, message: Message) -> Path:
        assert self._directory is not None, "connect comes first"
        return self._directory / f"{message.sender}-{message.receiver}-{message.bucket}"
