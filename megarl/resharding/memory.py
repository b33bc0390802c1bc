"""Memory that two processes of a machine share, on the host or on a CUDA device.

torch's own sharing keeps reference counts in a file of /dev/shm, which a killed process leaves behind, and its
allocator, like vLLM's pool for sleep, returns parts of larger blocks.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import torch

_LAZY_PEER_ACCESS = 1
_DRIVER_BLOCK = 2 << 20
"""CUDA allocates smaller memory in blocks of this size, and a handle shares the whole block with all that is in it."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * 64),)


class _Runtime:
    """Functions of the CUDA runtime that torch does not offer, from the library that torch has loaded."""

    def __init__(self) -> None:
        assert torch.version.cuda is not None, "called on CUDA only"
        self._library = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
        self._library.cudaGetErrorString.restype = ctypes.c_char_p
        self._library.cudaIpcOpenMemHandle.argtypes = (ctypes.POINTER(ctypes.c_void_p), _Handle, ctypes.c_uint)

    def call(self, name: str, *args: Any) -> None:
        """Calls a function; raises ValueError if it fails."""
        code = getattr(self._library, name)(*args)
        if code:
            self._library.cudaGetLastError()  # otherwise torch's next call would report it
            raise ValueError(f"{name} failed: {self._library.cudaGetErrorString(code).decode()}")


class _Bytes:
    """Device memory that torch wraps without a copy."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        data = {"shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "version": 3}
        self.__cuda_array_interface__ = data


class DeviceMapping:
    """Another process's DeviceRecvBuffer on the same device; raises ValueError if it cannot be mapped."""

    def __init__(self, handle: str, device: torch.device) -> None:
        self._runtime = _Runtime()
        self._device = device
        text, nbytes = handle.split()
        self._pointer = ctypes.c_void_p()
        with torch.cuda.device(device):
            shared = _Handle.from_buffer_copy(bytes.fromhex(text))
            self._runtime.call("cudaIpcOpenMemHandle", ctypes.byref(self._pointer), shared, _LAZY_PEER_ACCESS)
        self.memory = _tensor(self._pointer, int(nbytes), device)

    def close(self) -> None:
        """Unmaps it after pending work on the device."""
        with torch.cuda.device(self._device):
            torch.cuda.synchronize(self._device)
            self._runtime.call("cudaIpcCloseMemHandle", self._pointer)


def _tensor(pointer: ctypes.c_void_p, nbytes: int, device: torch.device) -> torch.Tensor:
    assert pointer.value is not None
    tensor = torch.as_tensor(_Bytes(pointer.value, nbytes), device=device)
    assert tensor.data_ptr() == pointer.value, f"torch has copied memory that is not on {device}"
    return tensor


class HostRecvBuffer:
    """Anonymous host memory, flat uint8, of which nothing is left when processes are killed; mapped by its handle.

    It is kept between syncs, because the first touch of a page costs as much as a copy. ``release`` frees its pages, in
    processes that have mapped it as well, and keeps the mappings valid; ``prepare`` must precede the next use, and
    raises MemoryError if the machine lacks the memory.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = max(1, nbytes)
        self._file = os.memfd_create("megarl-recv", os.MFD_CLOEXEC)
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
                raise MemoryError(f"no room for {self._nbytes} bytes of receive buffer: {error}") from error
            self._map = _map(self._file, self._nbytes)
            self.memory = torch.frombuffer(self._map, dtype=torch.uint8)

    def release(self) -> None:
        if self._map is not None:
            self._map.madvise(mmap.MADV_REMOVE)
            self._map = None
            self.memory = torch.empty(0, dtype=torch.uint8)

    def __del__(self) -> None:
        os.close(self._file)


def map_host(handle: str) -> torch.Tensor:
    """Maps another process's HostRecvBuffer; raises ValueError if the process does not exist or does not permit it."""
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


class DeviceRecvBuffer:
    """Memory of a CUDA device, outside every allocator's pools; ``prepare`` and ``release`` surround each sync."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._nbytes = max(1, nbytes)
        self._device = device
        self._runtime = _Runtime()
        self._pointer: ctypes.c_void_p | None = None
        self.prepare()

    def prepare(self) -> None:
        if self._pointer is not None:
            return
        pointer = ctypes.c_void_p()
        handle = _Handle()
        whole = -(-self._nbytes // _DRIVER_BLOCK) * _DRIVER_BLOCK
        torch.cuda.empty_cache()  # blocks that torch's allocator keeps are not available here
        with torch.cuda.device(self._device):
            try:
                self._runtime.call("cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(whole))
            except ValueError as error:
                raise ValueError(f"no {self._nbytes} bytes for the receive buffer: {error}") from error
            try:
                self._runtime.call("cudaIpcGetMemHandle", ctypes.byref(handle), pointer)
            except ValueError:
                self._runtime.call("cudaFree", pointer)
                raise
        self._pointer = pointer
        self.memory = _tensor(pointer, self._nbytes, self._device)
        self.handle = f"{bytes(handle).hex()} {self._nbytes}"

    def release(self) -> None:
        if self._pointer is not None:
            self.memory = torch.empty(0, dtype=torch.uint8, device=self._device)
            with torch.cuda.device(self._device):
                torch.cuda.synchronize(self._device)
                self._runtime.call("cudaFree", self._pointer)
            self._pointer = None


class PeerMappings:
    """Receive buffers of other processes, as mapped into this one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._mapped: dict[int, tuple[str, torch.Tensor | DeviceMapping]] = {}

    def open(self, receiver: int, handle: str) -> None:
        """Maps a receiver's buffer unless it is mapped already; raises ValueError if that fails."""
        known, _ = self._mapped.get(receiver, ("", None))
        if known != handle:
            on_host = self._device.type == "cpu"
            self._mapped[receiver] = handle, map_host(handle) if on_host else DeviceMapping(handle, self._device)

    def __getitem__(self, receiver: int) -> torch.Tensor:
        mapped = self._mapped[receiver][1]
        return mapped if isinstance(mapped, torch.Tensor) else mapped.memory

    def end_sync(self) -> None:
        """Unmaps CUDA memory, before its owner releases it."""
        if self._device.type != "cpu":
            self.close()

    def close(self) -> None:
        for _, mapped in self._mapped.values():
            if not isinstance(mapped, torch.Tensor):
                mapped.close()
        self._mapped.clear()


RecvBuffer = HostRecvBuffer | DeviceRecvBuffer


def make_recv_buffer(nbytes: int, device: torch.device) -> RecvBuffer:
    return HostRecvBuffer(nbytes) if device.type == "cpu" else DeviceRecvBuffer(nbytes, device)
