"""The parameters of a running vLLM model, replaced by those that a sync brings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from megarl.rollout.layers import Layer, running_layer
from megarl.weights.regions import Box, TensorInfo


@dataclass(kw_only=True)
class _Parameter:
    """One parameter; tied layers share it."""

    info: TensorInfo
    live: nn.Parameter | None
    owners: list[tuple[Layer, str]] = field(default_factory=list)


class LiveWeights:
    """A vLLM model's parameters under vLLM's own names, each with the full shape of this rank's shard.

    What runs as it is loaded is overwritten in place, where captured graphs look for it. What vLLM packs (matrices and
    experts on a CPU) or quantizes is made anew when all parameters of the layer have arrived, straight from the memory
    in which they arrive where a layer arrives at once.

    Args:
        model: of a worker, after loading.
        model_config: vLLM's.

    Attributes:
        settled: whether ``settle`` has replaced weights since ``begin``.
        peak_bytes: the most that was held back since ``begin``, until the rest of a layer or of a parameter came.

    Raises:
        ValueError: vLLM keeps a parameter in a form that cannot be written.
    """

    def __init__(self, model: nn.Module, model_config: ModelConfig) -> None:
        self._parameters: dict[str, _Parameter] = {}
        self._layers: list[Layer] = []
        names: dict[int, str] = {}
        for path, module in model.named_modules():
            if next(module.parameters(recurse=False), None) is None:
                continue
            output = isinstance(module, ParallelLMHead) or module is getattr(model, "lm_head", None)
            computes = output or not isinstance(module, VocabParallelEmbedding)
            layer = running_layer(path, module, model_config, computes=computes)
            self._layers.append(layer)
            for attribute, info in layer.infos.items():
                parameter = getattr(module, attribute)
                name = names.setdefault(id(parameter), f"{path}.{attribute}")
                live = parameter if attribute in layer.in_place else None
                self._parameters.setdefault(name, _Parameter(info=info, live=live)).owners.append((layer, attribute))
        self.begin()

    def check(self, expected: Mapping[str, TensorInfo]) -> None:
        """Compares what a sync would bring with what the model has.

        Raises:
            ValueError: they differ; it lists every difference.
        """
        ours = {name: parameter.info for name, parameter in self._parameters.items()}
        problems = [f"{name}: unknown to vLLM's model" for name in expected if name not in ours]
        problems += [f"{name}: not in the shard map" for name in ours if name not in expected]
        problems += [
            f"{name}: {ours[name]} in vLLM's model, {info} in the shard map"
            for name, info in expected.items()
            if name in ours and ours[name] != info
        ]
        if problems:
            raise ValueError("the shard map does not describe this vLLM model:\n  " + "\n  ".join(problems))

    def begin(self) -> None:
        """A sync begins, which brings every parameter once; what an earlier one has left unfinished is dropped."""
        self.settled = False
        self.peak_bytes = 0
        self._waiting: set[Layer] = set()
        self._assembled: dict[str, torch.Tensor] = {}
        for layer in self._layers:
            layer.begin()

    @torch.no_grad()
    def write(self, params: Mapping[str, torch.Tensor], box: Box | None = None) -> None:
        """Takes what has arrived; the tensors' memory may be reused afterwards.

        Args:
            params: whole parameters with their shapes and dtypes; or, where there is a box, that part of one.
            box: the part; those of a parameter come in row-major order.
        """
        for name, tensor in params.items():
            parameter = self._parameters[name]
            self._check_tensor(name, parameter.info, tensor, box)
            if parameter.live is not None:
                where = Box.whole(parameter.info.shape) if box is None else box
                parameter.live.data[where.slices].copy_(tensor)
            if box is not None:
                if parameter.live is None:
                    tensor = self._assemble(name, tensor, box)
                if box.stop != parameter.info.shape:
                    continue
                self._assembled.pop(name, None)
            for layer, attribute in parameter.owners:
                self._waiting.add(layer)
                layer.arrive(attribute, None if parameter.live is not None else tensor, borrowed=box is None)
        self._waiting = {layer for layer in self._waiting if not layer.loaded}
        for layer in self._waiting:
            layer.keep()
        held = [*self._assembled.values(), *(tensor for layer in self._waiting for tensor in layer.arrived.values())]
        self.peak_bytes = max(self.peak_bytes, sum(tensor.nbytes for tensor in held))

    @torch.no_grad()
    def settle(self) -> None:
        """Finishes the quantized layers of a sync that failed half-way: with zeros, until the next full one.

        Its scales may be those of the whole matrix, for which the engine's ranks wait for each other, layer by layer: a
        rank that goes no further would keep the others waiting.
        """
        for layer in self._layers:
            if layer.quantized and not layer.loaded:
                layer.fill()
                self.settled = True

    def _assemble(self, name: str, tensor: torch.Tensor, box: Box) -> torch.Tensor:
        """Puts a part to its place in the whole parameter; that."""
        if name not in self._assembled:
            self._assembled[name] = torch.empty(
                self._parameters[name].info.shape, dtype=tensor.dtype, device=tensor.device
            )
        self._assembled[name][box.slices] = tensor
        return self._assembled[name]

    def _check_tensor(self, name: str, info: TensorInfo, tensor: torch.Tensor, box: Box | None) -> None:
        shape = info.shape if box is None else box.shape
        if tuple(tensor.shape) != shape or tensor.dtype is not getattr(torch, info.dtype):
            raise ValueError(f"{name}: got {tuple(tensor.shape)} {tensor.dtype}, the model has {shape} {info.dtype}")
