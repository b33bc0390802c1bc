"""Memory that two processes of a machine share, into which the sender's copies land."""

from __future__ import annotations

import mmap
import os
from typing import Any, Protocol

import torch


class Landing(Protocol):
    """Memory that this process owns.

    Args:
        memory: flat, uint8.
        handle: by which another process maps it.
    """

    memory: torch.Tensor
    handle: str

    def rest(self) -> None:
        """Called after each sync; nobody else has it mapped where the device is not a CPU."""
        ...

    def release(self) -> None:
        """Gives the memory back; ``prepare`` comes before the next use."""
        ...

    def prepare(self) -> None:
        """Sees to it that there is memory behind it; the handle may be another afterwards."""
        ...


class HostLanding:
    """Anonymous memory of the host. It has no name, so that nothing of it is left when processes are killed.

    It stays from sync to sync: the first touch of a page costs as much as a copy. ``release`` gives its pages back,
    those that others have mapped as well, and the mappings stay what they are.

    Raises:
        MemoryError: the machine has not that much.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = max(1, nbytes)
        self._file = os.memfd_create("megarl-landing", os.MFD_CLOEXEC)
        os.ftruncate(self._file, self._nbytes)
        status = os.fstat(self._file)
        self.handle = f"{os.getpid()} {self._file} {status.st_dev} {status.st_ino} {self._nbytes}"
        self._map: mmap.mmap | None = None
        self.prepare()

    def prepare(self) -> None:
        if self._map is None:
            try:
                os.posix_fallocate(self._file, 0, self._nbytes)
            except OSError as error:
                raise MemoryError(f"no room for {self._nbytes} bytes of landing memory: {error}") from error
            self._map = _map(self._file, self._nbytes)
            self.memory = torch.frombuffer(self._map, dtype=torch.uint8)

    def rest(self) -> None:
        pass

    def release(self) -> None:
        if self._map is not None:
            self._map.madvise(mmap.MADV_REMOVE)
            self._map = None
            self.memory = torch.empty(0, dtype=torch.uint8)

    def __del__(self) -> None:
        os.close(self._file)


def map_host(handle: str) -> torch.Tensor:
    """Maps another process's HostLanding.

    Raises:
        ValueError: the process is not to be found, or not to be looked into.
    """
    pid, file, device, inode, nbytes = map(int, handle.split())
    path = f"/proc/{pid}/fd/{file}"
    try:
        opened = os.open(path, os.O_RDWR)
    except OSError as error:
        raise ValueError(f"cannot map {path}: {error.strerror}; with transport gloo nothing is mapped") from error
    try:
        status = os.fstat(opened)
        if (status.st_dev, status.st_ino) != (device, inode):
            raise ValueError(f"{path} is other memory than offered: do the ranks share a process namespace?")
        return torch.frombuffer(_map(opened, nbytes), dtype=torch.uint8)
    finally:
        os.close(opened)


def _map(file: int, nbytes: int) -> mmap.mmap:
    return mmap.mmap(file, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


class DeviceLanding:
    """Memory of a CUDA device, outside every allocator's pools. It is there during a sync alone.

    Args:
        device: of this process.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._nbytes, self._device = max(1, nbytes), device
        self._allocation: Any = None
        self.prepare()

    def prepare(self) -> None:
        if self._allocation is None:
            from megarl.resharding.cuda import Allocation

            self._allocation = Allocation(self._nbytes, self._device)
            self.memory, self.handle = self._allocation.memory, self._allocation.handle

    def rest(self) -> None:
        self.release()

    def release(self) -> None:
        if self._allocation is not None:
            self.memory = torch.empty(0, dtype=torch.uint8, device=self._device)
            self._allocation.free()
            self._allocation = None


class Mappings:
    """Other processes' landing memory, as this process has it mapped.

    Args:
        device: of this process, and of the memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._mapped: dict[int, tuple[str, Any]] = {}

    def open(self, receiver: int, handle: str) -> None:
        """Maps what is offered for a receiver, where it is not mapped yet.

        Raises:
            ValueError: that is not possible.
        """
        known, _ = self._mapped.get(receiver, ("", None))
        if known == handle:
            return
        if self._device.type == "cpu":
            self._mapped[receiver] = handle, map_host(handle)
        else:
            from megarl.resharding.cuda import Mapping

            self._mapped[receiver] = handle, Mapping(handle, self._device)

    def __getitem__(self, receiver: int) -> torch.Tensor:
        mapped = self._mapped[receiver][1]
        return mapped if isinstance(mapped, torch.Tensor) else mapped.memory

    def rest(self) -> None:
        """Called after the last use in a sync: a CUDA device's memory must be unmapped before it is freed."""
        if self._device.type != "cpu":
            self.close()

    def close(self) -> None:
        """Unmaps everything."""
        for _, mapped in self._mapped.values():
            if not isinstance(mapped, torch.Tensor):
                mapped.close()
        self._mapped.clear()


def make_landing(nbytes: int, device: torch.device) -> Landing:
    """Landing memory on this process's device."""
    return HostLanding(nbytes) if device.type == "cpu" else DeviceLanding(nbytes, device)
