"""What vLLM's own loader takes of a checkpoint's tensors, for any TP rank and size: it runs on tensors without memory.

vLLM (0.32) has such tensors for its transfer engine ``sharded_rdt``: they record the views that the loaders make
of them, and where these are copied to.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from megarl.weights.shard_map import Box, TensorInfo

Copied = tuple[str, str, Box, str, Box]
"""A parameter, its dtype and the box of it, a checkpoint's tensor and the box of it."""


def copied_boxes(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], tp: int, rank: int) -> set[Copied]:
    """What a rank's loader copies, in boxes without axes of extent 1 that views have added or removed."""
    from vllm.distributed.weight_transfer.sharded_rdt_fake import BakeSink, FakeRDTTensor

    with _model(config, tp, rank) as model, _assignments_noted():
        names = {id(module): path for path, module in model.named_modules()}
        sink = BakeSink()
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                _stamp(sink, module, name, parameter)
        fakes: list[tuple[str, Any]] = []
        for name, info in tensors.items():
            dtype = getattr(torch, info.dtype)
            fakes.append((name, FakeRDTTensor(name, torch.Size(info.shape), dtype, torch.device("meta"), sink=sink)))
        model.load_weights(iter(fakes))
        found: set[Copied] = set()
        for module, copies in sink.copies_by_layer.items():
            for copy in copies:
                assert copy is not None
                param = f"{names[id(module)]}.{copy.param_name}"
                parameter = getattr(module, copy.param_name)
                shape = tuple(parameter.shape)
                source, chain = copy.src
                view = _viewed(torch.empty(tensors[source].shape, device="meta"), chain)
                found.add(
                    (
                        param,
                        str(parameter.dtype).removeprefix("torch."),
                        _box(shape, copy.offset, copy.shape, copy.stride),
                        source,
                        _box(tensors[source].shape, int(view.storage_offset()), view.shape, view.stride()),
                    )
                )
        return found


@contextmanager
def _assignments_noted() -> Iterator[None]:
    """Has tensors without memory know what the loader of delta nets does beyond ``copy_``: assign a view of them."""
    from vllm.distributed.weight_transfer.sharded_rdt_fake import SUPPORTED_OPS, FakeRDTTensor

    noted: Any = FakeRDTTensor.__torch_function__

    def function(_cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__setitem__:
            target, index, source = args
            return target[index].copy_(source)
        return noted(func, types, args, kwargs)

    views: Any = {torch.Tensor.view_as: "view_as"}
    with (
        mock.patch.dict(SUPPORTED_OPS, views),
        mock.patch.object(FakeRDTTensor, "__torch_function__", classmethod(function)),
    ):
        yield


def _stamp(sink: Any, module: Any, name: str, parameter: Any) -> None:
    """Has the loader of a parameter note whose it is."""
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    inner = getattr(parameter, "weight_loader", default_weight_loader)

    @functools.wraps(inner)
    def loader(*args: Any, **kwargs: Any) -> Any:
        sink.current = module, name
        try:
            return inner(*args, **kwargs)
        finally:
            sink.current = None

    parameter.weight_loader = loader


def _viewed(tensor: torch.Tensor, chain: Any) -> torch.Tensor:
    for method, args, kwargs in chain:
        tensor = getattr(tensor, method)(*args, **dict(kwargs))
    return tensor


def _box(shape: tuple[int, ...], offset: int, extents: Any, strides: Any) -> Box:
    """The box of a contiguous tensor that a view of it covers."""
    starts: list[int] = []
    for size in _strides(shape):
        starts.append(offset // size)
        offset %= size
    sizes = dict.fromkeys(range(len(shape)), 1)
    for extent, stride in zip(extents, strides, strict=True):
        if extent > 1:
            (axis,) = (axis for axis, size in enumerate(_strides(shape)) if size == stride and shape[axis] > 1)
            sizes[axis] = extent
    return Box(tuple(starts), tuple(start + sizes[axis] for axis, start in enumerate(starts)))


def _strides(shape: tuple[int, ...]) -> list[int]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return strides


def _group(size: int, rank: int) -> SimpleNamespace:
    """A group of ranks, as far as models look at it when they are made."""
    ranks = SimpleNamespace(size=lambda: size, rank=lambda: rank)
    return SimpleNamespace(
        world_size=size,
        rank=rank,
        rank_in_group=rank,
        is_first_rank=rank == 0,
        is_last_rank=rank == size - 1,
        device_group=ranks,
        cpu_group=ranks,
    )


@contextmanager
def _model(config: Mapping[str, Any], tp: int, rank: int) -> Iterator[Any]:
    """vLLM's model of a rank, without memory."""
    from megarl.rollout.vllm_environment import importing_vllm

    with importing_vllm("cpu"):
        from vllm import EngineArgs
        from vllm.config import set_current_vllm_config
        from vllm.distributed import parallel_state
        from vllm.model_executor.model_loader.utils import initialize_model

    with tempfile.TemporaryDirectory() as directory, ExitStack() as changes:
        (Path(directory) / "config.json").write_text(json.dumps(dict(config)))
        settings = EngineArgs(
            model=directory,
            dtype=config["dtype"],
            skip_tokenizer_init=True,
            load_format="dummy",
            enforce_eager=True,
            max_model_len=32,
        ).create_engine_config()
        settings.parallel_config.tensor_parallel_size = tp
        for group in ("_PP", "_DP", "_EP", "_PCP", "_DCP"):
            changes.enter_context(mock.patch.object(parallel_state, group, _group(1, 0), create=True))
        changes.enter_context(mock.patch.object(parallel_state, "_TP", _group(tp, rank)))
        changes.enter_context(set_current_vllm_config(settings))
        before = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, config["dtype"]))
        changes.callback(torch.set_default_dtype, before)
        with torch.device("meta"):
            model = initialize_model(settings)
        yield model
