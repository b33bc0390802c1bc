"""What vLLM's own loader copies of a checkpoint's tensors, on any TP rank, without memory for them.

vLLM (0.32) has such tensors for its transfer engine ``sharded_rdt``: they record the views that
the loaders make of them, and where these are copied to.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch

from megarl.models import model_spec
from megarl.rollout.vllm_environment import importing_vllm, scratch_directory, set_vllm_environment
from megarl.weights.hf_files import read_config
from megarl.weights.shard_map import Box, TensorInfo, adjacent_axis


class Copied(NamedTuple):
    """A box of a parameter, and the box of a checkpoint's tensor that is copied to it.

    Args:
        dtype: dtype of the parameter.
        transposed: whether rows and columns are exchanged.
    """

    param: str
    box: Box
    name: str
    region: Box
    dtype: str
    transposed: bool

    def continues(self, other: Copied) -> bool:
        """Whether it is the next part of the same tensors, along the first axis of both."""
        here = (self.param, self.name, self.dtype, self.transposed)
        if here != (other.param, other.name, other.dtype, other.transposed):
            return False
        if adjacent_axis(other.box, self.box) != 0:
            return False
        return adjacent_axis(other.region, self.region) == 0

    def __str__(self) -> str:
        return f"{self.name}{self.region} in {self.param}{self.box}, {self.dtype}"


def first_difference(config: Mapping[str, Any], tp: int) -> str | None:
    """Compares what vLLM's loader copies on every rank with the shard map, in bfloat16.

    For a process of its own, which ``set_vllm_environment`` has prepared.

    Raises:
        ValueError: the model is not supported, or the TP size does not fit it.
    """
    spec = model_spec(config, dtype="bfloat16")
    hf_config = spec.hf_config()
    if spec.family.engine_class is not None:
        hf_config["architectures"] = [spec.family.engine_class]
    for rank in range(tp):
        shard_map = spec.vllm_map(tp, rank)
        mapped: set[Copied] = set()
        for shard in shard_map.shards:
            dtype = shard_map.params[shard.param].dtype
            is_matrix = sum(extent > 1 for extent in shard.region.shape) > 1
            transposed = shard.transposed and is_matrix
            copy = Copied(
                param=shard.param,
                box=shard.box,
                name=shard.name,
                region=shard.region,
                dtype=dtype,
                transposed=transposed,
            )
            mapped.add(copy)
        mapped = _merged(mapped)
        found, zeroed = _copied_boxes(hf_config, spec.canonical(), tp, rank)
        copied = _merged(found)
        empty = shard_map.params.keys() - {shard.param for shard in shard_map.shards}
        if zeroed != empty:
            return f"rank {rank} of TP {tp}: the map and vLLM's loader differ in zeros: {sorted(zeroed ^ empty)}"
        for whose, boxes in (("vLLM's loader", copied - mapped), ("the map", mapped - copied)):
            if boxes:
                count = f"differences: {len(copied ^ mapped)}"
                return f"rank {rank} of TP {tp}: only {whose} has {min(boxes, key=str)}; {count}"
    return None


def _merged(copies: Iterable[Copied]) -> set[Copied]:
    """Joins copies that continue one another, such as those of experts."""
    found: list[Copied] = []
    for copy in sorted(copies):
        if found and copy.continues(found[-1]):
            last = found.pop()
            copy = last._replace(
                box=Box(last.box.start, copy.box.stop),
                region=Box(last.region.start, copy.region.stop),
            )
        found.append(copy)
    return set(found)


def _copied_boxes(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    tp: int,
    rank: int,
) -> tuple[set[Copied], set[str]]:
    """What a rank's loader copies, in boxes without axes of extent 1 that views add or remove.

    Returns:
        The copies, and the parameters that it sets to zero instead, as of biases that
        another rank adds.
    """
    from vllm.distributed.weight_transfer.sharded_rdt_fake import BakeSink, FakeRDTTensor

    with _model(config, tp, rank) as model:
        names = {id(module): path for path, module in model.named_modules()}
        owners: dict[int, tuple[Any, str]] = {}
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                owners.setdefault(parameter.untyped_storage()._cdata, (module, name))
        sink = BakeSink()
        fakes: list[tuple[str, Any]] = []
        make: Any = FakeRDTTensor
        for name, info in tensors.items():
            dtype = getattr(torch, info.dtype)
            shape = torch.Size(info.shape)
            fakes.append((name, make(name, shape, dtype, torch.device("meta"), sink=sink)))
        with _copies_noted(sink, owners) as empty:
            model.load_weights(iter(fakes))
        zeroed = {f"{names[id(module)]}.{name}" for module, name in empty}
        found: set[Copied] = set()
        for module, copies in sink.copies_by_layer.items():
            for copy in copies:
                assert copy is not None
                param = f"{names[id(module)]}.{copy.param_name}"
                parameter = getattr(module, copy.param_name)
                shape = tuple(parameter.shape)
                source, chain = copy.src
                view = _viewed(torch.empty(tensors[source].shape, device="meta"), chain)
                dtype = str(parameter.dtype).removeprefix("torch.")
                box = _box(shape, copy.offset, copy.shape, copy.stride)
                offset = int(view.storage_offset())
                region = _box(tensors[source].shape, offset, view.shape, view.stride())
                turned = _is_turned(copy.shape, copy.stride)
                transposed = turned != _is_turned(view.shape, view.stride())
                found.add(
                    Copied(
                        param=param,
                        box=box,
                        name=source,
                        region=region,
                        dtype=dtype,
                        transposed=transposed,
                    )
                )
        return found, zeroed


@contextmanager
def _copies_noted(sink: Any, owners: Mapping[int, tuple[Any, str]]) -> Iterator[list[tuple[Any, str]]]:
    """Has tensors without memory note every copy, also into parameters that have no loader of their own.

    The loader of delta nets assigns a view of a tensor; that of gpt-oss sets a bias to zero on all TP
    ranks but the first.

    Args:
        owners: module and name of each parameter, the first of those that share it, by its storage.

    Yields the parameters that get zeros in place of a tensor.
    """
    from vllm.distributed.weight_transfer.sharded_rdt_common import SUPPORTED_OPS
    from vllm.distributed.weight_transfer.sharded_rdt_fake import FakeRDTTensor

    empty: list[tuple[Any, str]] = []
    noted: Any = FakeRDTTensor.__torch_function__

    def function(_cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__setitem__:
            target, index, source = args
            return target[index].copy_(source)
        if func is torch.Tensor.zero_:
            args[0].is_zero = True
            return args[0]
        if func is torch.Tensor.copy_:
            owner = owners[args[0].untyped_storage()._cdata]
            if hasattr(args[1], "is_zero"):
                empty.append(owner)
                return args[0]
            sink.current = owner
        return noted(func, types, args, kwargs)

    views: Any = {torch.Tensor.view_as: "view_as"}
    with (
        mock.patch.dict(SUPPORTED_OPS, views),
        mock.patch.object(FakeRDTTensor, "__torch_function__", classmethod(function)),
    ):
        yield empty


def _viewed(tensor: torch.Tensor, chain: Any) -> torch.Tensor:
    """The view that a chain of recorded calls makes, or copies."""
    for method, args, kwargs in chain:
        if method != "contiguous":
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
            for axis, size in enumerate(_strides(shape)):
                if size == stride and shape[axis] > 1:
                    sizes[axis] = extent
    return Box(tuple(starts), tuple(start + sizes[axis] for axis, start in enumerate(starts)))


def _is_turned(extents: Any, strides: Any) -> bool:
    """Whether a view has the axes of a contiguous tensor in another order."""
    own = [stride for extent, stride in zip(extents, strides, strict=True) if extent > 1]
    return own != sorted(own, reverse=True)


def _strides(shape: tuple[int, ...]) -> list[int]:
    """The strides of a contiguous tensor."""
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
    with importing_vllm("cpu"), tempfile.TemporaryDirectory() as directory, ExitStack() as changes:
        from vllm import EngineArgs
        from vllm.config import set_current_vllm_config
        from vllm.distributed import parallel_state
        from vllm.model_executor.model_loader.utils import initialize_model

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


def main() -> None:
    """Prints the first difference of a model at TP 1 or 2 as JSON; the argument is its directory."""
    config = read_config(sys.argv[1])
    with scratch_directory() as scratch:
        set_vllm_environment("cpu", scratch)
        print(json.dumps(first_difference(config, 1) or first_difference(config, 2)))


if __name__ == "__main__":
    main()
