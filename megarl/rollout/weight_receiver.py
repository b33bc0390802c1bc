"""The receiver of weight syncs in vLLM's worker processes.

vLLM imports this file in every worker process, by the name of `WorkerExtension`, before it creates
the weight-transfer engine that is registered here. Only small plain data passes `collective_rpc`;
tensors arrive by the transport.
"""

from __future__ import annotations

import multiprocessing
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
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from megarl.resharding import Connection, Receiver, SyncError, SyncSpec, connect
from megarl.rollout.vllm_layers import Layer, running_layer
from megarl.stacks import answer_as_child
from megarl.weights.shard_map import Box, ShardMap, TensorInfo


@dataclass(kw_only=True)
class _Parameter:
    """A parameter, possibly of tied layers."""

    info: TensorInfo
    live: nn.Parameter | None
    owners: list[tuple[Layer, str]] = field(default_factory=list)


class EngineWeights:
    """The parameters of a vLLM model by vLLM's names, each with the full shape of this rank's shard.

    Parameters that run as they are loaded are overwritten in place, where captured graphs read
    them. Those that vLLM packs (matrices and experts on a CPU) or quantizes are made again when all
    parameters of the layer have arrived, without a copy if a layer arrives at once.

    Attributes:
        settled: whether `settle` has replaced weights since `begin`.
        peak_bytes: maximum bytes that waited for the rest of a layer or a parameter since `begin`.
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
                known = self._parameters.setdefault(name, _Parameter(info=info, live=live))
                known.owners.append((layer, attribute))
        self.begin()

    def check(self, expected: Mapping[str, TensorInfo]) -> None:
        """Compares a sync's parameters with the model's; raises ValueError with every difference."""
        problems: list[str] = []
        for name, info in expected.items():
            if name not in self._parameters:
                problems.append(f"{name}: unknown to vLLM's model")
                continue
            found = self._parameters[name].info
            if found != info:
                problems.append(f"{name}: {found} in vLLM's model, {info} in the shard map")
        for name in self._parameters:
            if name not in expected:
                problems.append(f"{name}: not in the shard map")
        if problems:
            lines = ["the shard map does not describe this vLLM model:", *problems]
            raise ValueError("\n  ".join(lines))

    def begin(self) -> None:
        """Starts a sync, which brings every parameter once; drops parameters of an unfinished one."""
        self.settled = False
        self.peak_bytes = 0
        self._waiting: set[Layer] = set()
        self._assembled: dict[str, torch.Tensor] = {}
        for layer in self._layers:
            layer.begin()

    @torch.no_grad()
    def write(self, params: Mapping[str, torch.Tensor], box: Box | None = None) -> None:
        """Writes tensors that have arrived, whose memory may be reused afterwards; see ``resharding.Load``."""
        for name, tensor in params.items():
            parameter = self._parameters[name]
            part = Box.whole(parameter.info.shape) if box is None else box
            arrived = None
            if parameter.live is not None:
                parameter.live.data[part.slices].copy_(tensor)
            elif box is None:
                arrived = tensor
            else:
                arrived = self._assemble(name, tensor, box)
            if part.stop != parameter.info.shape:
                continue
            self._assembled.pop(name, None)
            for layer, attribute in parameter.owners:
                self._waiting.add(layer)
                layer.arrive(attribute, arrived, borrowed=box is None)
        self._waiting = {layer for layer in self._waiting if not layer.loaded}
        held = list(self._assembled.values())
        for layer in self._waiting:
            layer.keep()
            held += layer.arrived.values()
        self.peak_bytes = max(self.peak_bytes, sum(tensor.nbytes for tensor in held))

    @torch.no_grad()
    def settle(self) -> None:
        """Fills the unfinished quantized layers of a failed sync with zeros.

        Ranks may compute the scales of a layer's matrix together: a rank that stopped would block
        the others.
        """
        for layer in self._layers:
            if layer.quantized and not layer.loaded:
                layer.fill()
                self.settled = True

    def _assemble(self, name: str, tensor: torch.Tensor, box: Box) -> torch.Tensor:
        """Copies a part into the whole parameter, and returns that."""
        whole = self._assembled.get(name)
        if whole is None:
            shape = self._parameters[name].info.shape
            whole = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
            self._assembled[name] = whole
        whole[box.slices] = tensor
        return whole


@dataclass(frozen=True, kw_only=True)
class CallOutcome:
    """The outcome of a call on a worker.

    Args:
        error: traceback; empty without an error.
        aborted: reason of an aborted sync, the same on all its ranks; else empty.
        consistent: whether all weights are of one version.
    """

    value: Any = None
    error: str = ""
    aborted: str = ""
    consistent: bool = True


@dataclass(kw_only=True)  # vLLM's base is not frozen
class ConnectInfo(WeightTransferInitInfo):
    """A connection to the trainer.

    Args:
        ranks: the engine's ranks in the sync, by tensor-parallel rank.
        version: last committed version; -1 before the first.
    """

    sync: SyncSpec
    ranks: Sequence[int]
    version: int


@dataclass(kw_only=True)
class SyncInfo(WeightTransferUpdateInfo):
    version: int


class ShardTransfer(WeightTransferEngine[ConnectInfo, SyncInfo]):
    """A rank's weights and its connection to the trainer.

    vLLM's worker calls `init_transfer_engine` to connect, then for every sync
    `start_weight_update`, `update_weights` and `finish_weight_update`; `shutdown` to disconnect.
    None of them raises or returns anything; `outcome` has the result. If a rank raised, vLLM's `mp`
    executor (0.32) would return the other ranks' answers from the next call.
    """

    init_info_cls = ConnectInfo
    update_info_cls = SyncInfo
    supports_draft_weight_update = False

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: VllmConfig,
        device: torch.device,
        model: nn.Module,
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self.outcome = CallOutcome()
        self._tp_rank = get_tensor_model_parallel_rank()
        if multiprocessing.parent_process() is not None:
            answer_as_child(f"rank-{self._tp_rank}")
        self._live: EngineWeights
        self._connection: Connection | None = None
        self._receiver: Receiver | None = None

    def prepare(self, shard_maps: Sequence[ShardMap], vocab_size: int) -> None:
        """Checks the shard map of this rank against the model, and excludes ids from `vocab_size` on from sampling.

        Called once, when all ranks have started. vLLM cuts the logits to the `vocab_size` of
        config.json, which may be larger than the vocabulary.
        """
        with self._report():
            _unlink_shared_memory()
            self._live = EngineWeights(self.model, self.model_config)
            self._live.check(shard_maps[self._tp_rank].params)

            def mask(_module: nn.Module, _args: object, logits: torch.Tensor | None) -> None:
                if logits is not None:  # None on all ranks but one
                    logits[..., vocab_size:] = float("-inf")

            for module in self.model.modules():
                if isinstance(module, LogitsProcessor) and vocab_size < module.org_vocab_size:
                    module.register_forward_hook(mask)

    def init_transfer_engine(self, init_info: ConnectInfo) -> None:
        """Connects to the other ranks of a sync, and waits for all of them. Ends an earlier connection."""
        with self._report():
            self.shutdown()
            rank = init_info.ranks[self._tp_rank]
            self._live.check(init_info.sync.receivers[rank].params)
            self._connection = connect(init_info.sync, rank, self.device)
            self._receiver = Receiver(self._connection, self._live.write, version=init_info.version)

    def start_weight_update(self) -> None:
        self._live.begin()

    def receive_weights(self, update_info: SyncInfo) -> None:
        """Writes this rank's shard as it arrives, until all ranks of the sync have committed the version."""
        with self._report():
            if self._connection is None or self._receiver is None:
                raise ValueError("the engine is not connected to the trainer: connect before receiving weights")
            try:
                stats = self._receiver.receive(update_info.version)
            except SyncError:
                if not self._connection.connected and self.parallel_config.tensor_parallel_size > 1:
                    self._live.settle()  # other ranks may be writing
                raise
            stats.peak_staging_bytes += self._live.peak_bytes
            self.outcome = CallOutcome(value=stats)

    def finish_weight_update(self) -> None:
        self._live.begin()

    def release(self) -> None:
        """Frees the memory in which weights arrive, until the next sync."""
        with self._report():
            if self._receiver is not None:
                self._receiver.release()

    def shutdown(self) -> None:
        """Ends the connection, if there is one."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None
        self._receiver = None

    @contextmanager
    def _report(self) -> Generator[None]:
        """Sets the outcome of the block, which may set its own."""
        self.outcome = CallOutcome()
        try:
            yield
        except Exception as error:
            consistent = True
            if self._receiver is not None:
                consistent = self._receiver.consistent and not self._live.settled
            aborted = ""
            if isinstance(error, SyncError):
                aborted = str(error)
            trace = traceback.format_exc()
            self.outcome = CallOutcome(error=trace, aborted=aborted, consistent=consistent)


def _unlink_shared_memory() -> None:
    """Removes the names of vLLM's shared memory, which all CPU ranks have mapped: killed ranks would leave them."""
    name = os.environ.get("VLLM_DIST_IDENT")  # vLLM's CPU worker sets it
    if name:
        for path in Path("/dev/shm").glob(f"{name}-*-cpushm_*"):
            path.unlink(missing_ok=True)


BACKEND = "megarl"

WeightTransferEngineFactory.register_engine(BACKEND, ShardTransfer)


class WorkerExtension:
    """Calls of the weight-transfer engine that vLLM's worker does not pass on; `self` is the worker."""

    def megarl_call(self: Any, method: str, *args: Any) -> CallOutcome:
        getattr(self.weight_transfer_engine, method)(*args)
        return self.weight_transfer_engine.outcome

    def megarl_outcome(self: Any) -> CallOutcome:
        return self.weight_transfer_engine.outcome
