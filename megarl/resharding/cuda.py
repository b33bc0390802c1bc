"""CUDA memory that another process on the device can map: the runtime's IPC, straight.

torch's own way of sharing keeps reference counts in a file of /dev/shm, which a killed process leaves behind; and its
allocator, like vLLM's pool for sleep, hands out parts of larger blocks. This memory is neither's.
"""

from __future__ import annotations

import ctypes
from typing import Any

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


class Allocation:
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
                raise ValueError(f"no {nbytes} bytes of landing memory: {error}") from error
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


class Mapping:
    """Another process's Allocation on the same device.

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
