"""Messages that senders write in place: into host memory, or by CUDA IPC into their own device's.

torch's own sharing keeps reference counts in a file of /dev/shm, which a killed process leaves
behind.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import torch

from megarl.resharding.buckets import bucket_views, recv_buffer_bytes, recv_views
from megarl.resharding.transfers.cuda import DeviceMapping, DeviceRecvBuffer
from megarl.resharding.transfers.transfer import Connection, WeightTransfer, Write
from megarl.weights.plan import Message


class SharedMemory(WeightTransfer):
    """The receive buffers that this rank owns, and those of other ranks, which it maps to write or read them.

    Senders write when the receiver allows it. Buffers on CUDA last for one sync.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        spec = connection.spec
        rank = connection.rank
        self._owned = {receiver: recv_buffer_bytes(spec.recv_buffers[receiver]) for receiver in spec.owned(rank)}
        self._others = spec.written(rank) - self._owned.keys()
        self.staging_bytes = sum(self._owned.values())
        self._buffers: dict[int, HostRecvBuffer | DeviceRecvBuffer] = {}
        self._handles: dict[int, str] = {}
        self._on_device: dict[int, DeviceMapping] = {}

    def connect(self) -> None:
        """Does nothing: ``begin`` maps the memory that is used in a sync."""

    def prepare(self) -> None:
        connection = self.connection
        for receiver, nbytes in self._owned.items():
            if receiver not in self._buffers:
                if connection.device.type == "cpu":
                    self._buffers[receiver] = HostRecvBuffer(nbytes)
                else:
                    self._buffers[receiver] = DeviceRecvBuffer(nbytes, connection.device)
            buffer = self._buffers[receiver]
            connection.mapped[receiver] = buffer.memory
            connection.barrier.post(f"recv_buffer/{receiver}", buffer.handle)

    def begin(self) -> None:
        connection = self.connection
        for receiver in self._others:
            handle = connection.barrier.read(f"recv_buffer/{receiver}")
            if connection.device.type != "cpu":
                mapping = DeviceMapping(handle, connection.device)
                self._on_device[receiver] = mapping
                connection.mapped[receiver] = mapping.memory
            elif handle != self._handles.get(receiver):
                self._handles[receiver] = handle
                connection.mapped[receiver] = map_host(handle)

    def send(self, message: Message, write: Write) -> None:
        receiver = message.receiver
        buffer = self.connection.spec.recv_buffers[receiver]
        views = bucket_views(self.connection.mapped[receiver], buffer, message.bucket)
        write(recv_views(message, buffer.buckets[message.bucket], views))

    def receive(self, message: Message, targets: Sequence[torch.Tensor]) -> None:
        """Does nothing: the sender has written the targets."""

    def finish(self) -> None:
        """Unmaps CUDA memory, before its owner releases it."""
        for receiver, mapping in self._on_device.items():
            self.connection.mapped.pop(receiver)
            mapping.close()
        self._on_device.clear()

    def release(self) -> None:
        for receiver, buffer in self._buffers.items():
            self.connection.mapped.pop(receiver)
            buffer.release()
        self._buffers.clear()

    def abort(self) -> None:
        self.finish()


class HostRecvBuffer:
    """Anonymous host memory, flat uint8, which ends with its processes; mapped by its handle.

    It is kept between syncs, because the first touch of a page costs as much as a copy. Raises
    MemoryError if the machine lacks the memory.
    """

    def __init__(self, nbytes: int) -> None:
        nbytes = max(1, nbytes)
        self._file = os.memfd_create("megarl-recv", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self._file, 0, nbytes)
        except OSError as error:
            raise MemoryError(f"no room for {nbytes} bytes of receive buffer: {error}") from error
        status = os.fstat(self._file)
        self.handle = f"{os.getpid()} {self._file} {status.st_dev} {status.st_ino} {nbytes}"
        self._map = _map(self._file, nbytes)
        self.memory = torch.frombuffer(self._map, dtype=torch.uint8)

    def release(self) -> None:
        """Frees the pages, also of processes that have mapped them; the memory is not used again."""
        self._map.madvise(mmap.MADV_REMOVE)

    def __del__(self) -> None:
        os.close(self._file)


def map_host(handle: str) -> torch.Tensor:
    """Maps another process's HostRecvBuffer; raises ValueError if the process is gone or forbids it."""
    pid, file, device, inode, nbytes = map(int, handle.split())
    path = f"/proc/{pid}/fd/{file}"
    try:
        opened = os.open(path, os.O_RDWR)
    except OSError as error:
        problem = f"cannot map {path}: {error.strerror}"
        raise ValueError(f"{problem}; with transport gloo nothing is mapped") from error
    try:
        status = os.fstat(opened)
        if (status.st_dev, status.st_ino) != (device, inode):
            question = "do the ranks share a process namespace?"
            raise ValueError(f"{path} is other memory than offered: {question}")
        return torch.frombuffer(_map(opened, nbytes), dtype=torch.uint8)
    finally:
        os.close(opened)


def _map(file: int, nbytes: int) -> mmap.mmap:
    return mmap.mmap(file, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
