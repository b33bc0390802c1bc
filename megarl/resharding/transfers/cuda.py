"""CUDA: memory that processes share by CUDA IPC, and NCCL between GPUs.

The allocators of torch and of vLLM's sleep return parts of larger blocks, which CUDA IPC shares as
a whole.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]  (public by its documentation)
    Store,  # pyright: ignore[reportPrivateImportUsage]
    Work,
)

from megarl.resharding.sync_barrier import PeerError

_POLL_S = 0.0005
_LOOK_S = 0.1

_MOST_BLOCKS = 4
"""Blocks of a transfer's kernel at most; each also takes some 10 MB of NCCL's buffers."""

_LAZY_PEER_ACCESS = 1
_DRIVER_BLOCK = 2 << 20
"""CUDA allocates smaller memory in blocks of this size, and a handle shares the whole block with all that is in it."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * 64),)


@cache
def _runtime() -> ctypes.CDLL:
    """The library of the CUDA runtime that torch has loaded, for what torch does not offer."""
    assert torch.version.cuda is not None, "called on CUDA only"
    library = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
    library.cudaGetErrorString.restype = ctypes.c_char_p
    library.cudaIpcOpenMemHandle.argtypes = (ctypes.POINTER(ctypes.c_void_p), _Handle, ctypes.c_uint)
    return library


def call_runtime(name: str, *args: Any) -> None:
    """Calls a function of the runtime; raises ValueError if it fails."""
    code = getattr(_runtime(), name)(*args)
    if code:
        _runtime().cudaGetLastError()  # otherwise torch's next call would report it
        raise ValueError(f"{name} failed: {_runtime().cudaGetErrorString(code).decode()}")


class DeviceMapping:
    """Another process's DeviceRecvBuffer on the same device; raises ValueError if it cannot be mapped."""

    def __init__(self, handle: str, device: torch.device) -> None:
        self._device = device
        text, nbytes = handle.split()
        self._pointer = ctypes.c_void_p()
        with torch.cuda.device(device):
            shared = _Handle.from_buffer_copy(bytes.fromhex(text))
            call_runtime("cudaIpcOpenMemHandle", ctypes.byref(self._pointer), shared, _LAZY_PEER_ACCESS)
        self.memory = _tensor(self._pointer, int(nbytes), device)

    def close(self) -> None:
        """Unmaps it after pending work on the device."""
        with torch.cuda.device(self._device):
            torch.cuda.synchronize(self._device)
            call_runtime("cudaIpcCloseMemHandle", self._pointer)


def _tensor(pointer: ctypes.c_void_p, nbytes: int, device: torch.device) -> torch.Tensor:
    assert pointer.value is not None
    array = {"shape": (nbytes,), "typestr": "|u1", "data": (pointer.value, False), "version": 3}
    shared = SimpleNamespace(__cuda_array_interface__=array)
    tensor = torch.as_tensor(shared, device=device)  # without a copy
    assert tensor.data_ptr() == pointer.value, f"torch has copied memory that is not on {device}"
    return tensor


class DeviceRecvBuffer:
    """Memory of a CUDA device, outside every allocator's pools; raises ValueError if there is none."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        nbytes = max(1, nbytes)
        self._device = device
        self._pointer = ctypes.c_void_p()
        handle = _Handle()
        whole = -(-nbytes // _DRIVER_BLOCK) * _DRIVER_BLOCK
        torch.cuda.empty_cache()  # blocks that torch's allocator keeps are not available here
        with torch.cuda.device(device):
            try:
                call_runtime("cudaMalloc", ctypes.byref(self._pointer), ctypes.c_size_t(whole))
            except ValueError as error:
                raise ValueError(f"no {nbytes} bytes for the receive buffer: {error}") from error
            try:
                call_runtime("cudaIpcGetMemHandle", ctypes.byref(handle), self._pointer)
            except ValueError:
                call_runtime("cudaFree", self._pointer)
                raise
        self.memory = _tensor(self._pointer, nbytes, device)
        self.handle = f"{bytes(handle).hex()} {nbytes}"

    def release(self) -> None:
        """Frees it after pending work on the device; it is not used again."""
        with torch.cuda.device(self._device):
            torch.cuda.synchronize(self._device)
            call_runtime("cudaFree", self._pointer)


def multiprocessors(device: torch.device) -> int:
    """Returns a GPU's multiprocessors. One runs one block of a transfer's kernel at a time."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def blocks_of(ranks: int, available: int) -> int:
    """Returns the thread blocks of a transfer's kernel: NCCL's channels, a power of two.

    The kernels spin on their blocks until the peers' kernels run. All those of a rank that
    exchanges frames with every other fit half of a GPU at once, on an H100 up to 34 ranks.

    Args:
        available: multiprocessors of the smallest GPU.
    """
    kernels = 2 * (ranks - 1)
    blocks = _MOST_BLOCKS
    while blocks > 1 and blocks * kernels > available // 2:
        blocks //= 2
    return blocks


class NcclTransport:
    """NCCL between GPUs, one rank each; see ``GlooTransport`` for the other arguments.

    Each pair has a communicator per direction: transfers of one communicator queue up on a stream,
    so two ranks that both receive before they send would deadlock. Every rank connects to its peers
    at once and in order, so that there is no deadlock. Transfers of different communicators run at
    the same time, on ``blocks_of`` blocks each; NCCL's default, up to 32, would let those that wait
    for peers keep the others from the GPU. Raises ValueError if a rank has too many peers for that.

    Args:
        name: name of the connection, which reports of torch and NCCL show.
        to, from_: peers to which this rank sends, and from which it receives.
        look: function that raises if the sync was aborted; called now and then while waiting, as
            NCCL does not notice that a peer is gone.
    """

    def __init__(
        self,
        store: Store,
        members: Sequence[int],
        rank: int,
        *,
        name: str,
        to: Collection[int],
        from_: Collection[int],
        device: torch.device,
        timeout_s: float,
        look: Callable[[], None],
    ) -> None:
        from torch.distributed import ProcessGroupNCCL

        self._index = {member: i for i, member in enumerate(members)}
        self._rank = rank
        self.timeout_s = timeout_s
        self.look = look
        available = self._fewest_multiprocessors(store, device)
        blocks = blocks_of(len(members), available)
        transfers = len(to) + len(from_)
        if transfers * blocks > available:
            limit = f"a GPU runs {available} at once: use engines with less TP, or trainers with less TP and PP"
            raise ValueError(f"rank {rank} has {transfers} transfers with other ranks in a sync, and {limit}")
        self._groups: dict[bool, Any] = {}
        for upwards, direction in ((True, "up"), (False, "down")):
            options: Any = ProcessGroupNCCL.Options()
            # NCCL's watchdog ends the process; waits here time out earlier.
            options._timeout = timedelta(seconds=4 * timeout_s)
            options.group_name = f"{name} {direction}"
            options.config.min_ctas = 1
            options.config.max_ctas = blocks
            direction_store = PrefixStore(direction, store)
            group = ProcessGroupNCCL(direction_store, self._index[rank], len(members), options)
            self._groups[upwards] = group
        hello = torch.zeros(1, dtype=torch.uint8, device=device)
        for peer in sorted({*to, *from_}):
            for upwards in (True, False):
                if upwards == (rank < peer):
                    if peer in to:
                        self.send(peer, 0, hello).wait("NCCL")
                elif peer in from_:
                    self.receive(peer, 0, hello).wait("NCCL")

    def _fewest_multiprocessors(self, store: Store, device: torch.device) -> int:
        """Returns those of the smallest GPU, so that all ranks have kernels of the same size."""
        keys = [f"multiprocessors/{member}" for member in self._index]
        store.set(keys[self._index[self._rank]], str(multiprocessors(device)))
        deadline = time.monotonic() + self.timeout_s
        while not store.check(keys):
            if time.monotonic() > deadline:
                raise PeerError(f"NCCL: not all ranks of the sync have come within {self.timeout_s:g} s")
            self.look()
            time.sleep(_POLL_S)
        return min(int(store.get(key)) for key in keys)

    def send(self, peer: int, tag: int, buffer: torch.Tensor) -> NcclTransfer:
        # Without tags, as both sides use the same order.
        work = self._groups[self._rank < peer].send([buffer], self._index[peer], 0)
        return NcclTransfer(self, work, peer, buffer)

    def receive(self, peer: int, tag: int, buffer: torch.Tensor) -> NcclTransfer:
        work = self._groups[peer < self._rank].recv([buffer], self._index[peer], 0)
        return NcclTransfer(self, work, peer, buffer)

    def abort(self) -> None:
        for group in self._groups.values():
            group.abort()
        self._groups.clear()

    def close(self) -> None:
        for group in self._groups.values():
            group.shutdown()
        self._groups.clear()


@dataclass(frozen=True)
class NcclTransfer:
    transport: NcclTransport
    work: Work
    peer: int
    buffer: torch.Tensor

    def wait(self, failure: str) -> None:
        """Does what ``GlooTransfer.wait`` does; also raises as ``look`` does."""
        start = looked = time.monotonic()
        try:
            while not self.work.is_completed():
                now = time.monotonic()
                if now - start > self.transport.timeout_s:
                    late = f"the transfer with rank {self.peer} took more than {self.transport.timeout_s:g} s"
                    raise PeerError(f"{failure}: {late}")
                if now - looked > _LOOK_S:
                    self.transport.look()
                    looked = now
                time.sleep(_POLL_S)
            self.work.wait()  # orders the current stream after the transfer
        except torch.distributed.DistError as error:
            raise PeerError(f"{failure}: the transfer with rank {self.peer} failed: {error}") from error
