"""Layers of a running vLLM model that receive new weights: overwritten, packed, or quantized."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from megarl.weights.shard_map import TensorInfo

Tensors = Mapping[str, torch.Tensor]

_UNQUANTIZED = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod)


class Layer:
    """A module with its direct parameters, and those of them that have arrived.

    Args:
        infos: parameters as they are loaded, before any packing.
        in_place: names of parameters that are overwritten in place.
        install: called with the others once all have arrived.
        quantized: whether the module runs with quantized weights.

    Attributes:
        arrived: parameters that wait for the rest.
        loaded: whether all parameters were installed since `begin`.
        afterwards: called when they are; None: nothing to do.
    """

    def __init__(
        self,
        module: nn.Module,
        infos: Mapping[str, TensorInfo],
        in_place: Collection[str],
        install: Callable[[Tensors], None],
        *,
        quantized: bool = False,
    ) -> None:
        self.infos = infos
        self.in_place = in_place
        self.quantized = quantized
        self._module = module
        self._install = install
        self.afterwards: Callable[[], None] | None = None
        self.begin()

    def begin(self) -> None:
        """Drops what has arrived."""
        self.loaded = False
        self._awaited = set(self.infos)
        self.arrived: dict[str, torch.Tensor] = {}
        self._borrowed: set[str] = set()

    def arrive(self, name: str, tensor: torch.Tensor | None = None, *, borrowed: bool = True) -> None:
        """Records a parameter; with the last one, installs the layer's weights.

        Args:
            tensor: values; None for a parameter that was overwritten in place.
            borrowed: whether the memory belongs to the caller, until `keep`.
        """
        self._awaited.discard(name)
        if tensor is not None:
            self.arrived[name] = tensor
            if borrowed:
                self._borrowed.add(name)
        if not self._awaited:
            self._install(self.arrived)
            if self.afterwards is not None:
                self.afterwards()
            self._copy_borrowed()
            self.begin()
            self.loaded = True

    def _copy_borrowed(self) -> None:
        """Copies parameters that still use borrowed memory, where vLLM's kernel needs no packing."""
        borrowed = {_storage(self.arrived[name]) for name in self._borrowed}
        for parameter in self._module.parameters(recurse=False):
            if _storage(parameter) in borrowed:
                parameter.data = parameter.data.clone()

    def keep(self) -> None:
        """Copies borrowed parameters, which wait for the rest of the layer."""
        for name in self._borrowed:
            self.arrived[name] = self.arrived[name].clone()
        self._borrowed.clear()

    def fill(self) -> None:
        """Uses zeros for the parameters that have not arrived."""
        device = next(self._module.parameters(recurse=False)).device
        for name in sorted(self._awaited):
            info = self.infos[name]
            zeros = torch.zeros(info.shape, dtype=getattr(torch, info.dtype), device=device)
            self.arrive(name, zeros, borrowed=False)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def running_layer(path: str, module: nn.Module, model_config: ModelConfig, *, computes: bool) -> Layer:
    """Returns the layer of a module; raises ValueError where a parameter cannot be written.

    Args:
        computes: False for an embedding that only looks up rows.
    """
    method = getattr(module, "quant_method", None)
    if method is not None and not isinstance(method, _UNQUANTIZED):
        quantize = partial(_quantize, module, model_config)
        return Layer(module, _reloaded(module), (), quantize, quantized=True)
    infos = {name: _as_loaded(module, name) for name, _ in module.named_parameters(recurse=False)}
    on_cpu = next(module.parameters(recurse=False)).device.type == "cpu"
    in_place: Collection[str] = ()
    # Experts and convolutions on a CPU are packed, possibly to the same shape.
    is_convolution = any(len(info.shape) == 3 for info in infos.values())
    if not (on_cpu and (is_convolution or isinstance(method, UnquantizedFusedMoEMethod))):
        in_place = _overwritten(path, module, infos)
    if method is not None and computes:
        return Layer(module, infos, in_place, partial(_pack, module))
    module.__dict__.pop("cpu_linear", None)  # vLLM (0.28 to 0.32) packs embeddings too, and never uses it
    return Layer(module, infos, in_place, lambda _: None)


def _overwritten(path: str, module: nn.Module, infos: Mapping[str, TensorInfo]) -> list[str]:
    """Returns the parameters that run as they are loaded; on a CPU, vLLM packs and empties the others."""
    in_place: list[str] = []
    for name, parameter in module.named_parameters(recurse=False):
        shape = tuple(parameter.shape)
        if shape == infos[name].shape:
            in_place.append(name)
        elif parameter.numel():
            raise ValueError(
                f"{path}.{name}: vLLM's kernel keeps {shape} of what is loaded as {infos[name].shape}, "
                "which a sync cannot overwrite; choose another kernel for it"
            )
    return in_place


def _as_loaded(module: nn.Module, name: str) -> TensorInfo:
    """Returns a parameter's shape and dtype before packing, which may empty, pad or convert it."""
    recorded = get_layerwise_info(module).restore_metadata[0].get(name)  # has no biases
    live: Any = getattr(module, name)
    if recorded is not None:
        return _info(recorded)
    dtype: Any = live.dtype
    if name == "bias":  # packing may convert it
        dtype = getattr(module, "params_dtype", dtype)
    return TensorInfo(tuple(live.shape), _dtype_name(dtype))


def _info(tensor: torch.Tensor) -> TensorInfo:
    return TensorInfo(tuple(tensor.shape), _dtype_name(tensor.dtype))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _pack(module: Any, tensors: Tensors) -> None:
    """Packs weights into new memory on a CPU, as vLLM's model loader does after loading."""
    for name, tensor in tensors.items():
        setattr(module, name, nn.Parameter(tensor, requires_grad=False))
    if tensors and isinstance(module.quant_method, UnquantizedFusedMoEMethod):
        module.quant_method.moe_kernel = None  # with a kernel, experts count as packed (vLLM 0.28 to 0.32)
    module.quant_method.process_weights_after_loading(module)


def _reloaded(module: nn.Module) -> dict[str, TensorInfo]:
    """Makes vLLM's layerwise reload take this rank's shard as it is; returns the parameters of the layer."""
    recorded: dict[str, Any] = dict(get_layerwise_info(module).restore_metadata[0])
    bias = module._parameters.get("bias")  # is not quantized
    if bias is not None:
        recorded["bias"] = bias
    for parameter in recorded.values():
        parameter.weight_loader = default_weight_loader
    return {name: _info(parameter) for name, parameter in recorded.items()}


def _quantize(module: nn.Module, model_config: ModelConfig, tensors: Tensors) -> None:
    """Runs vLLM's layerwise reload of a layer: loads its parameters, quantizes them, and copies them into place."""
    initialize_layerwise_reload(module)
    for name, tensor in tensors.items():
        parameter: Any = getattr(module, name)
        parameter.weight_loader(parameter, tensor)
    finalize_layerwise_reload(module, model_config)
