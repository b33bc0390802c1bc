"""Runs megatron-core on a CPU in place of its CUDA device.

megatron-core 0.19 names CUDA in places that have nothing to do with CUDA kernels: ``device="cuda"``
in factory calls, ``torch.cuda.current_device()`` as a device, the type names
``torch.cuda.FloatTensor`` in the optimizers, streams around collectives, CUDA's random state in the
RNG tracker. ``install`` answers all of them with the CPU, and hides the GPUs of the machine: torch
must not start CUDA by itself, whose devices would contradict these answers. It changes torch for
the whole process, so it runs only in a process that hosts Megatron ranks, never in one that runs
vLLM.

Experts get different numbers of tokens, so tensors that ranks gather and scatter differ in size,
which Gloo refuses except in an all-to-all; that replaces the others.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def _with_lists_of_sizes(all_to_all_single: Callable[..., Any]) -> Callable[..., Any]:
    """Converts sizes to lists: Megatron leaves them in tensors on the CPU (moe/token_dispatcher.py, 0.19)."""

    @functools.wraps(all_to_all_single)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in ("output_split_sizes", "input_split_sizes"):
            if isinstance(kwargs.get(name), Tensor):
                kwargs[name] = kwargs[name].tolist()
        return all_to_all_single(*args, **kwargs)

    return call


def _of_any_sizes(all_gather: Callable[..., Any]) -> Callable[..., Any]:
    """All-gathers tensors that may differ along the first axis."""

    @functools.wraps(all_gather)
    def call(tensor_list: Sequence[Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if len({part.shape for part in tensor_list}) == 1:
            return all_gather(tensor_list, tensor, *args, **kwargs)
        sizes = [len(part) for part in tensor_list]
        received = _exchange([tensor] * len(tensor_list), sizes, **kwargs)
        for part, values in zip(tensor_list, received, strict=True):
            part.copy_(values)
        return None

    return call


def _reduce_scatter(output: Tensor, input_list: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    received = _exchange(input_list, [len(output)] * len(input_list), group=group)
    output.copy_(torch.stack(list(received)).sum(0))


def _exchange(sent: Sequence[Tensor], sizes: Sequence[int], group: dist.ProcessGroup) -> Sequence[Tensor]:
    """Sends each rank of a group its tensor; returns the ranks' tensors, of ``sizes`` along the first axis."""
    received = sent[0].new_empty(sum(sizes), *sent[0].shape[1:])
    dist.all_to_all_single(
        received,
        torch.cat(list(sent)),
        output_split_sizes=list(sizes),
        input_split_sizes=[len(part) for part in sent],
        group=group,
    )
    return received.split(list(sizes))


_FACTORIES = ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "tensor", "zeros")
_CPU = torch.device("cpu")


def install() -> None:
    """Redirects CUDA names to the CPU; a second call does nothing. Nothing may have used CUDA before."""
    if torch.cuda.current_device is _current_device:
        return
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    _replace_methods()
    dist.all_to_all_single = _with_lists_of_sizes(dist.all_to_all_single)
    dist.all_gather = _of_any_sizes(dist.all_gather)
    dist.reduce_scatter = _reduce_scatter
    for name, answer in _cuda_functions().items():
        setattr(torch.cuda, name, answer)
    torch.cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    torch.cuda.random.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    torch.cuda.nvtx.range_push = _ignore()
    torch.cuda.nvtx.range_pop = _ignore()
    _optimize_without_compiler()
    from megatron.core.tensor_parallel import random

    # Megatron leaves changes of the random state to the start of CUDA (random.py, 0.19).
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    # The tracker reports changes of the CPU's random state as faults; here it is the device's.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.CRITICAL)


def _optimize_without_compiler() -> None:
    """Keeps Adam from importing torch's compiler (2.13), from which its methods exempt themselves."""
    optimizer = torch.optim.Optimizer
    adam = torch.optim.Adam
    methods = (
        optimizer.add_param_group,
        optimizer.zero_grad,
        optimizer.state_dict,
        optimizer.load_state_dict,
    )
    for method in methods:
        plain: Any = inspect.unwrap(method)
        plain.__dynamo_disable = plain
    adam.step = torch.no_grad()(inspect.unwrap(adam.step))


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(factory)
    def call(*args: Any, **kwargs: Any) -> Tensor:
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return call


def _replace_methods() -> None:
    tensor_type = torch.Tensor.type
    tensor_to = torch.Tensor.to

    def type_name(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = tensor_type(self, *args, **kwargs)
        if isinstance(answer, str):
            # The optimizers sort parameters by the names of the CUDA tensor types.
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        args = tuple(_CPU if _is_cuda(arg) else arg for arg in args)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return tensor_to(self, *args, **kwargs)

    torch.Tensor.type = type_name
    torch.Tensor.to = to
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.nn.Module.cuda = lambda self, *_, **__: self


class _Stream:
    """A stream or event of a device that runs everything in order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record_event(self, *_: Any) -> _Stream:
        return self

    def __getattr__(self, _name: str) -> Callable[..., None]:
        return _ignore()

    def query(self) -> bool:
        return True


def _ignore() -> Callable[..., None]:
    """Returns a new function that does nothing: torch._dynamo refuses one object under two names of torch."""
    return lambda *_, **__: None


def _current_device() -> torch.device:
    return _CPU


def _cuda_functions() -> dict[str, Any]:
    stream = _Stream()
    return {
        "current_device": _current_device,
        "set_device": _ignore(),
        "is_available": lambda: False,
        "device_count": lambda: 0,
        "synchronize": _ignore(),
        "empty_cache": _ignore(),
        "Stream": _Stream,
        "Event": _Stream,
        "stream": lambda _stream: contextlib.nullcontext(),
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "get_device_capability": lambda *_: (0, 0),
        "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "memory_reserved": lambda *_: 0,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "manual_seed": lambda seed: torch.manual_seed(seed),
    }
