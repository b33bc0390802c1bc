"""Memory that two processes of a machine share, on the host or on a CUDA device.

torch's own way of sharing keeps reference counts in a file of /dev/shm, which a killed process leaves behind; and its
allocator, like vLLM's pool for sleep, hands out parts of larger blocks. This memory is neither's.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any, Protocol

import torch

_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * 64),)


class _Runtime:
    """The few functions of the CUDA runtime that torch does not have; torch has loaded the library."""

    def __init__(self) -> None:
        assert torch.version.cuda is not None, "called on CUDA only"
        self._library = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
        self._library.cudaGetErrorString.restype = ctypes.c_char_p
        self._library.cudaIpcOpenMemHandle.argtypes = (ctypes.POINTER(ctypes.c_void_p), _Handle, ctypes.c_uint)

    def call(self, name: str, *args: Any) -> None:
        """Calls a function by name.

        Raises:
            ValueError: it failed.
        """
        code = getattr(self._library, name)(*args)
        if code:
            self._library.cudaGetLastError()  # otherwise the next call of torch's would report it
            raise ValueError(f"{name} failed: {self._library.cudaGetErrorString(code).decode()}")


class _Bytes:
    """Device memory as torch takes it, without a copy."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }


class DeviceAllocation:
    """Device memory that others may map.

    Args:
        nbytes: how much.
        device: of this process.

    Raises:
        ValueError: the device has not that much.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._runtime, self._device = _Runtime(), device
        self._pointer = ctypes.c_void_p()
        handle = _Handle()
        torch.cuda.empty_cache()  # what torch's allocator keeps for later is lost to this one
        with torch.cuda.device(device):
            try:
                self._runtime.call("cudaMalloc", ctypes.byref(self._pointer), ctypes.c_size_t(nbytes))
            except ValueError as error:
                raise ValueError(f"no {nbytes} bytes of receive buffer: {error}") from error
            try:
                self._runtime.call("cudaIpcGetMemHandle", ctypes.byref(handle), self._pointer)
            except ValueError:
                self._runtime.call("cudaFree", self._pointer)
                raise
        self.memory = _tensor(self._pointer, nbytes, device)
        self.handle = f"{bytes(handle).hex()} {nbytes}"

    def free(self) -> None:
        """Gives the memory back; nobody may have it mapped."""
        with torch.cuda.device(self._device):
            torch.cuda.synchronize(self._device)
            self._runtime.call("cudaFree", self._pointer)


class DeviceMapping:
    """Another process's DeviceAllocation on the same device.

    Args:
        handle: of it.
        device: of this process.

    Raises:
        ValueError: it cannot be mapped.
    """

    def __init__(self, handle: str, device: torch.device) -> None:
        self._runtime, self._device = _Runtime(), device
        text, nbytes = handle.split()
        self._pointer = ctypes.c_void_p()
        with torch.cuda.device(device):
            shared = _Handle.from_buffer_copy(bytes.fromhex(text))
            self._runtime.call("cudaIpcOpenMemHandle", ctypes.byref(self._pointer), shared, _LAZY_PEER_ACCESS)
        self.memory = _tensor(self._pointer, int(nbytes), device)

    def close(self) -> None:
        """Unmaps it, after what is under way on the device."""
        with torch.cuda.device(self._device):
            torch.cuda.synchronize(self._device)
            self._runtime.call("cudaIpcCloseMemHandle", self._pointer)


def _tensor(pointer: ctypes.c_void_p, nbytes: int, device: torch.device) -> torch.Tensor:
    assert pointer.value is not None
    tensor = torch.as_tensor(_Bytes(pointer.value, nbytes), device=device)
    assert tensor.data_ptr() == pointer.value, f"torch has copied memory that is not on {device}"
    return tensor


class RecvBuffer(Protocol):
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


class HostRecvBuffer:
    """Anonymous memory of the host. It has no name, so that nothing of it is left when processes are killed.

    It stays from sync to sync: the first touch of a page costs as much as a copy. ``release`` gives its pages back,
    those that others have mapped as well, and the mappings stay what they are.

    Raises:
        MemoryError: the machine has not that much.
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
    """Maps another process's HostRecvBuffer.

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


class DeviceRecvBuffer:
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
            from megarl.resharding.memory import DeviceAllocation

            self._allocation = DeviceAllocation(self._nbytes, self._device)
            self.memory, self.handle = self._allocation.memory, self._allocation.handle

    def rest(self) -> None:
        self.release()

    def release(self) -> None:
        if self._allocation is not None:
            self.memory = torch.empty(0, dtype=torch.uint8, device=self._device)
            self._allocation.free()
            self._allocation = None


class PeerMappings:
    """Other processes' receive buffer, as this process has it mapped.

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
            from megarl.resharding.memory import DeviceMapping

            self._mapped[receiver] = handle, DeviceMapping(handle, self._device)

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


def make_recv_buffer(nbytes: int, device: torch.device) -> RecvBuffer:
    """RecvBuffer memory on this process's device."""
    return HostRecvBuffer(nbytes) if device.type == "cpu" else DeviceRecvBuffer(nbytes, device)
