"""Offloads tensors to host memory by releasing their storages; every view and reference stays valid."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_SMALL = 1 << 20


@dataclass(frozen=True, kw_only=True)
class HostCopy:
    """The contents of released storages; ``parts`` are storages with the pieces of their copies."""

    nbytes: int
    parts: Sequence[tuple[torch.UntypedStorage, list[Tensor]]]

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
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage
    nbytes = 0
    parts: list[tuple[torch.UntypedStorage, list[Tensor]]] = []
    for storage in storages.values():
        pinned = storage.is_cuda
        nbytes += storage.nbytes()
        pieces: list[Tensor] = []
        for part in _bytes(storage).split(host_sizes(storage.nbytes(), pinned=pinned)):
            piece = torch.empty(len(part), dtype=torch.uint8, pin_memory=pinned, device="cpu")
            pieces.append(piece.copy_(part))
        storage.resize_(0)
        parts.append((storage, pieces))
    return HostCopy(nbytes=nbytes, parts=parts)


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
