"""Collectives as Megatron's mixtures of experts call them, and as NCCL takes them, for Gloo.

Experts get different numbers of tokens, so what ranks gather and scatter differs in size, which Gloo refuses. An
all-to-all may differ in size there, and does both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist


def install() -> None:
    """Replaces the collectives of torch.distributed."""
    dist.all_to_all_single = _with_lists_of_sizes(dist.all_to_all_single)
    dist.all_gather = _of_any_sizes(dist.all_gather)
    dist.reduce_scatter = _reduce_scatter


def _with_lists_of_sizes(all_to_all_single: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron leaves sizes in tensors where these are on the CPU already (moe/token_dispatcher.py, 0.16)."""

    @functools.wraps(all_to_all_single)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in ("output_split_sizes", "input_split_sizes"):
            if isinstance(kwargs.get(name), torch.Tensor):
                kwargs[name] = kwargs[name].tolist()
        return all_to_all_single(*args, **kwargs)

    return call


def _of_any_sizes(all_gather: Callable[..., Any]) -> Callable[..., Any]:
    """An all-gather of tensors that may differ along the first axis."""

    @functools.wraps(all_gather)
    def call(tensor_list: Sequence[torch.Tensor], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if len({part.shape for part in tensor_list}) == 1:
            return all_gather(tensor_list, tensor, *args, **kwargs)
        received = _exchange([tensor] * len(tensor_list), [len(part) for part in tensor_list], **kwargs)
        for part, values in zip(tensor_list, received, strict=True):
            part.copy_(values)
        return None

    return call


def _reduce_scatter(output: torch.Tensor, input_list: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """The sum over the ranks of what each has for this rank."""
    output.copy_(torch.stack(list(_exchange(input_list, [len(output)] * len(input_list), group=group))).sum(0))


def _exchange(sent: Sequence[torch.Tensor], sizes: Sequence[int], group: dist.ProcessGroup) -> Sequence[torch.Tensor]:
    """Sends each rank of a group its tensor, and returns what they have sent: ``sizes`` along the first axis."""
    received = sent[0].new_empty(sum(sizes), *sent[0].shape[1:])
    dist.all_to_all_single(
        received,
        torch.cat(list(sent)),
        output_split_sizes=list(sizes),
        input_split_sizes=[len(part) for part in sent],
        group=group,
    )
    return received.split(list(sizes))
