"""Offloads tensors to host memory by releasing their storages; every view and reference stays valid."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.resharding.transfers.cuda import call_runtime
from megarl.resharding.transfers.shared_memory import HostRecvBuffer, map_host

_SMALL = 1 << 20


@dataclass(frozen=True, kw_only=True)
class HostCopy:
    """The contents of released storages; ``parts`` are storages with the pieces of their copies."""

    nbytes: int
    parts: Sequence[tuple[torch.UntypedStorage, list[Tensor]]]

    def release(self) -> None:
        """Frees the storages again, whose contents have not changed since they were copied."""
        for storage, _ in self.parts:
            storage.resize_(0)

    def restore(self) -> None:
        """Allocates the storages again and copies their contents back."""
        for storage, pieces in self.parts:
            sizes = [piece.nbytes for piece in pieces]
            storage.resize_(sum(sizes))
            for part, piece in zip(_bytes(storage).split(sizes), pieces, strict=True):
                part.copy_(piece)


def release(tensors: Iterable[Tensor]) -> HostCopy:
    """Copies the storages of tensors to host memory, pinned for a CUDA device, and releases them one by one.

    Until ``restore``, torch refuses matrix products and embeddings with these tensors and their
    views. Not every device checks elementwise operations.
    """
    nbytes = 0
    parts: list[tuple[torch.UntypedStorage, list[Tensor]]] = []
    for storage in _storages(tensors):
        pinned = storage.is_cuda
        nbytes += storage.nbytes()
        pieces: list[Tensor] = []
        for part in _bytes(storage).split(host_sizes(storage.nbytes(), pinned=pinned)):
            piece = torch.empty(len(part), dtype=torch.uint8, pin_memory=pinned, device="cpu")
            pieces.append(piece.copy_(part))
        storage.resize_(0)
        parts.append((storage, pieces))
    return HostCopy(nbytes=nbytes, parts=parts)


def share(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> HostCopy | None:
    """Copies storages to host memory that the ranks of a group on a node share; they never change.

    Collective over the group, whose ranks have the same contents. The memory ends with its
    processes. For a CUDA device each rank registers it as pinned. None on all ranks, if the node has
    no room for it, or one of them may not map or register it.
    """
    storages = _storages(tensors)
    sizes = [storage.nbytes() for storage in storages]
    places = _gathered(_place(), group)
    owner = places.index(places[group.rank()])
    pinned = storages[0].is_cuda
    buffer: HostRecvBuffer | None = None
    if owner == group.rank():
        buffer = _copied(storages, sizes)
    handles = _gathered(None if buffer is None else buffer.handle, group)
    memory = None if handles[owner] is None else _mapped(buffer, handles[owner], pinned)
    # The owner closes its file when it returns.
    if not all(_gathered(memory is not None, group)):
        if memory is not None and pinned:
            call_runtime("cudaHostUnregister", ctypes.c_void_p(memory.data_ptr()))
        return None
    assert memory is not None
    parts: list[tuple[torch.UntypedStorage, list[Tensor]]] = []
    for storage, piece in zip(storages, memory.split(sizes), strict=True):
        parts.append((storage, [piece]))
    return HostCopy(nbytes=sum(sizes), parts=parts)


def _copied(storages: Sequence[torch.UntypedStorage], sizes: Sequence[int]) -> HostRecvBuffer | None:
    """Returns a buffer with the contents of storages; None if there is no room."""
    try:
        buffer = HostRecvBuffer(sum(sizes))
    except (MemoryError, OSError) as error:
        _tell_refusal(error)
        return None
    for part, storage in zip(buffer.memory.split(sizes), storages, strict=True):
        part.copy_(_bytes(storage))
    return buffer


def _mapped(buffer: HostRecvBuffer | None, handle: str, pinned: bool) -> Tensor | None:
    """Returns a rank's own buffer, or another's; None if it may not be mapped or registered."""
    try:
        memory = map_host(handle) if buffer is None else buffer.memory
        if pinned:
            pointer = ctypes.c_void_p(memory.data_ptr())
            call_runtime("cudaHostRegister", pointer, ctypes.c_size_t(memory.nbytes), 0)
    except (ValueError, OSError) as error:
        _tell_refusal(error)
        return None
    return memory


def _tell_refusal(error: Exception) -> None:
    print(f"Replicas keep a copy each of weights that never change: {error}.", file=sys.stderr)


def _place() -> str:
    """Returns the same text for the processes that can map each other's memory."""
    machine = Path("/proc/sys/kernel/random/boot_id").read_text()
    return f"{machine} {os.readlink('/proc/self/ns/pid')}"


def _gathered(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Returns the values of all ranks of a group, in order."""
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Returns the storages of tensors, each of them once."""
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage
    return list(storages.values())


def host_sizes(nbytes: int, *, pinned: bool) -> list[int]:
    """Returns the sizes of the pieces in which the host keeps a storage.

    torch rounds pinned memory up to powers of two; all sizes but the last are such powers.
    """
    sizes: list[int] = []
    while pinned and nbytes > _SMALL:
        sizes.append(1 << (nbytes.bit_length() - 1))
        nbytes -= sizes[-1]
    return [*sizes, nbytes]


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
