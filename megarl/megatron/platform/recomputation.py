"""Megatron's recomputation of norms and MLPs, made to work with its local layers (0.19.2)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def mend_recomputation() -> None:
    """Changes three functions that `recompute_modules: [layernorm, mlp]` calls.

    - ``CheckpointWithoutOutput`` takes its default, ``fp8=False``, for true, and then calls Transformer
      Engine.
    - ``_share_storage`` is an extension that every rank would compile.
    - A bias that an MLP returns would become an output of ``checkpoint``'s node, whose backward pass
      then calls itself without end.
    """
    from megatron.core import tensor_parallel
    from megatron.core.tensor_parallel import random

    def checkpoint(function: Callable[..., Any], distribute: bool, *args: Any) -> Any:
        return random.checkpoint(partial(_without_parameters, function), distribute, *args)

    tensor_parallel.CheckpointWithoutOutput = partial(
        random.CheckpointWithoutOutput,
        fp8=None,  # pyright: ignore[reportArgumentType]
    )
    tensor_parallel.checkpoint = checkpoint
    random._share_storage_ext = SimpleNamespace(share_storage=_share_storage)


def _without_parameters(function: Callable[..., Any], *args: Any) -> Any:
    """Returns a function's result, with views in place of parameters."""
    result = function(*args)
    if not isinstance(result, tuple):
        return result
    return tuple(value.view_as(value) if isinstance(value, torch.nn.Parameter) else value for value in result)


def _share_storage(released: Tensor, computed: Tensor) -> None:
    """Gives a released tensor, and all that shares its storage, the contents of another; autograd does not see it."""
    storage = released.untyped_storage()
    contents = computed.untyped_storage()
    storage.resize_(contents.nbytes())
    storage.copy_(contents)
