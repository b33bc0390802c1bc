"""The parameters of a running vLLM model, written in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from megarl.weights.regions import TensorInfo


class LiveWeights:
    """A vLLM model's parameters under vLLM's own names, each with the full shape of this rank's shard.

    On a CPU vLLM packs a matrix after loading and empties the parameter, so a write gives the layer its matrix back
    and has it packed again, as the loading of a checkpoint does. On CUDA a parameter is overwritten in place, where
    captured graphs look for it.

    Args:
        model: the model of a worker, after loading.

    Raises:
        ValueError: a layer is quantized: its parameters are not the weights.
    """

    def __init__(self, model: nn.Module) -> None:
        self._owners: dict[str, list[tuple[nn.Module, str]]] = {}
        self._infos: dict[str, TensorInfo] = {}
        self._awaited: dict[nn.Module, set[str]] = {}
        names: dict[int, str] = {}
        for path, module in model.named_modules():
            _check_unquantized(path, module)
            for attribute, parameter in module.named_parameters(recurse=False):
                name = names.setdefault(id(parameter), f"{path}.{attribute}")
                self._owners.setdefault(name, []).append((module, attribute))
                self._infos.setdefault(name, _full_info(module, attribute, parameter))

    def check(self, expected: Mapping[str, TensorInfo]) -> None:
        """Compares what a sync would bring with what the model has.

        Raises:
            ValueError: they differ; it lists every difference.
        """
        problems = [f"{name}: unknown to vLLM's model" for name in expected if name not in self._infos]
        problems += [f"{name}: not in the shard map" for name in self._infos if name not in expected]
        problems += [
            f"{name}: {self._infos[name]} in vLLM's model, {info} in the shard map"
            for name, info in expected.items()
            if name in self._infos and self._infos[name] != info
        ]
        if problems:
            raise ValueError("the shard map does not describe this vLLM model:\n  " + "\n  ".join(problems))

    @torch.no_grad()
    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Replaces one parameter; the tensor may be reused afterwards.

        A layer is packed when all its parameters have been written: packing may take in its bias, too (vLLM 0.28).

        Args:
            tensor: the parameter's full shape and dtype.
        """
        info = self._infos[name]
        if tuple(tensor.shape) != info.shape or _dtype_name(tensor.dtype) != info.dtype:
            raise ValueError(f"{name}: got {tuple(tensor.shape)} {tensor.dtype}, the model has {info}")
        for module, attribute in self._owners[name]:
            parameter = getattr(module, attribute)
            if parameter.shape == tensor.shape:
                parameter.data.copy_(tensor)
            else:
                setattr(module, attribute, nn.Parameter(tensor.to(parameter.device, copy=True), requires_grad=False))
            awaited = self._awaited.setdefault(module, _parameter_names(module))
            awaited.discard(attribute)
            if not awaited:
                del self._awaited[module]
                _pack(module)


def _parameter_names(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_parameters(recurse=False)}


def _pack(module: nn.Module) -> None:
    """What vLLM's model loader does with a layer that has its weights."""
    quant_method = getattr(module, "quant_method", None)
    if quant_method is not None:
        quant_method.process_weights_after_loading(module)


def _check_unquantized(path: str, module: nn.Module) -> None:
    method = getattr(module, "quant_method", None)
    if method is not None and not isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod):
        if next(module.parameters(recurse=False), None) is None:
            return
        raise ValueError(f"{path} is quantized ({type(method).__name__}): weights can be synced into plain layers only")


def _full_info(module: Any, attribute: str, parameter: nn.Parameter) -> TensorInfo:
    """The shape and dtype that the parameter was loaded with.

    Packing empties a matrix, and may turn a half-precision bias into float32.
    """
    shape = tuple(parameter.shape)
    if attribute == "weight" and not parameter.numel():
        shape = (sum(module.output_partition_sizes), module.input_size_per_partition)
    return TensorInfo(shape, _dtype_name(getattr(module, "params_dtype", parameter.dtype)))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
