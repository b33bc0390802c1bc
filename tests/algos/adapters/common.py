"""Helpers of the adapters: arguments as tensors, and ranks as threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

Args = dict[str, Any]
Runner = Callable[[Args], Args]


class UnsupportedError(Exception):
    """The case needs something that megarl.algos does not have."""


def pick(table: dict[str, Any], name: str) -> Any:
    """The entry that the case names."""
    if name not in table:
        raise UnsupportedError(f"{name!r} is none of {', '.join(table)}")
    return table[name]


def take(args: Args, *names: str) -> list[Tensor]:
    """Arguments as tensors of the default dtype, or of integers; removes them from ``args``."""
    return [torch.tensor(args.pop(name)) for name in names]


def floats(args: Args, *names: str) -> list[Tensor]:
    """Arguments as tensors of the default dtype."""
    return [torch.tensor(args.pop(name), dtype=torch.get_default_dtype()) for name in names]


def take_mask(args: Args, name: str = "mask") -> Tensor:
    """An argument as a bool tensor."""
    return torch.tensor(args.pop(name)).bool()


def done(args: Args) -> None:
    """Checks that every argument has been used."""
    if args:
        raise UnsupportedError(", ".join(args))


def numbered(names: list[Any]) -> Tensor:
    """Groups by any names as numbers from 0 on."""
    order = {name: index for index, name in enumerate(dict.fromkeys(names))}
    return torch.tensor([order[name] for name in names])


def local(vector: Tensor) -> Tensor:
    """The reduction of one rank."""
    return vector


def on_ranks(function: Callable[..., Any], per_rank: list[tuple[Any, ...]]) -> list[Any]:
    """Results of ``function(*arguments, reduce)`` on ranks that are threads; leaving out a reduction breaks it."""
    vectors: list[Tensor | None] = [None] * len(per_rank)
    meet = threading.Barrier(len(per_rank), timeout=60)

    def rank(index: int) -> Any:
        def reduce(vector: Tensor) -> Tensor:
            vectors[index] = vector
            meet.wait()
            total = torch.stack([v for v in vectors if v is not None]).sum(0)
            meet.wait()
            return total

        try:
            return function(*per_rank[index], reduce)
        except Exception:
            meet.abort()
            raise

    with ThreadPoolExecutor(len(per_rank)) as pool:
        return list(pool.map(rank, range(len(per_rank))))
