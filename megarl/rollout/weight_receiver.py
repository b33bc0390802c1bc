"""The receiving end of a weight sync in vLLM's worker processes."""

from __future__ import annotations

import os
import traceback
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from megarl.resharding import Connection, Receiver, SyncError, SyncSpec, connect
from megarl.rollout.vllm_layers import Layer, running_layer
from megarl.weights.shard_map import Box, ShardMap, TensorInfo


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


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a call on a worker came to.

    Args:
        value: what it returned.
        error: the traceback; empty where it returned.
        aborted: the reason of an aborted sync, the same on all its ranks; empty where it was not that.
        consistent: whether the weights are all of one version.
    """

    value: Any = None
    error: str = ""
    aborted: str = ""
    consistent: bool = True


@dataclass(kw_only=True)  # vLLM's base is not frozen
class ConnectInfo(WeightTransferInitInfo):
    """A connection.

    Args:
        sync: with this engine's parts of the plan.
        ranks: the engine's ranks in the sync, by tensor-parallel rank.
        version: the last committed one; -1 before the first.
    """

    sync: SyncSpec
    ranks: Sequence[int]
    version: int


@dataclass(kw_only=True)
class SyncInfo(WeightTransferUpdateInfo):
    """One sync.

    Args:
        version: of the weights that it brings.
    """

    version: int


class ShardTransfer(WeightTransferEngine[ConnectInfo, SyncInfo]):
    """One rank's weights, and its end of the transport.

    vLLM's worker calls it: ``init_transfer_engine`` to connect, then, for every sync, ``start_weight_update``,
    ``update_weights`` and ``finish_weight_update``; ``shutdown`` to disconnect. None of them raises or returns
    anything: what they came to is left in ``outcome``. When a rank raises, vLLM's ``mp`` executor (0.32) leaves the
    other ranks' answers unread, and the next call would get them.
    """

    init_info_cls = ConnectInfo
    update_info_cls = SyncInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self.outcome = Outcome()
        self._tp_rank = get_tensor_model_parallel_rank()
        self._live: LiveWeights
        self._connection: Connection | None = None
        self._receiver: Receiver | None = None

    def prepare(self, shard_maps: Sequence[ShardMap], vocab_size: int) -> None:
        """Checks the map of this rank against the model, and keeps ids that mean nothing from being sampled.

        Called once, before anything else, when all ranks have started. vLLM cuts the logits to the ``vocab_size`` of
        config.json; a checkpoint's may be larger than its vocabulary.

        Args:
            shard_maps: by tensor-parallel rank.
            vocab_size: ids from here on have probability zero.
        """
        with self._report():
            _unlink_shared_memory()
            self._live = LiveWeights(self.model, self.model_config)
            self._live.check(shard_maps[self._tp_rank].params)

            def mask(_module: nn.Module, _args: object, logits: torch.Tensor | None) -> None:
                if logits is not None:  # only one rank has them
                    logits[..., vocab_size:] = float("-inf")

            for module in self.model.modules():
                if isinstance(module, LogitsProcessor) and vocab_size < module.org_vocab_size:
                    module.register_forward_hook(mask)

    def init_transfer_engine(self, init_info: ConnectInfo) -> None:
        """Connects with the other ranks of a sync; waits for all of them. Ends an earlier connection."""
        with self._report():
            self.shutdown()
            rank = init_info.ranks[self._tp_rank]
            self._live.check(init_info.sync.receivers[rank].params)
            self._connection = connect(init_info.sync, rank, self.device)
            self._receiver = Receiver(self._connection, self._live.write, version=init_info.version)

    def start_weight_update(self) -> None:
        """A sync begins."""
        self._live.begin()

    def receive_weights(self, update_info: SyncInfo) -> None:
        """Writes this rank's shard as it arrives; returns when all ranks of the sync have committed the version."""
        with self._report():
            if self._connection is None or self._receiver is None:
                raise ValueError("the engine is not connected to the trainer: connect before receiving weights")
            try:
                stats = self._receiver.receive(update_info.version)
            except SyncError:
                if not self._connection.connected and self.parallel_config.tensor_parallel_size > 1:
                    self._live.settle()  # other ranks may have begun to write
                raise
            stats.peak_staging_bytes += self._live.peak_bytes
            self.outcome = Outcome(value=stats)

    def finish_weight_update(self) -> None:
        """The sync has ended, for better or worse."""
        self._live.begin()

    def release(self) -> None:
        """Gives back the memory in which weights arrive, until the next sync."""
        with self._report():
            if self._receiver is not None:
                self._receiver.release()

    def shutdown(self) -> None:
        """Ends the connection, where there is one."""
        if self._connection is not None and self._receiver is not None:
            self._receiver.release()
            self._connection.close()
        self._connection = self._receiver = None

    @contextmanager
    def _report(self) -> Generator[None]:
        """The outcome of the block: nothing, unless it sets another, or the exception that ends it."""
        self.outcome = Outcome()
        try:
            yield
        except Exception as error:
            consistent = self._receiver is None or (self._receiver.consistent and not self._live.settled)
            aborted = str(error) if isinstance(error, SyncError) else ""
            self.outcome = Outcome(error=traceback.format_exc(), aborted=aborted, consistent=consistent)


def _unlink_shared_memory() -> None:
    """Removes the names of the memory through which vLLM's CPU ranks reduce.

    All ranks have mapped it when they have started; one that is killed, as a slow one is at the end, would leave it.
    """
    if name := os.environ.get("VLLM_DIST_IDENT"):  # vLLM's CPU worker sets it
        for path in Path("/dev/shm").glob(f"{name}-*-cpushm_*"):
            path.unlink(missing_ok=True)
