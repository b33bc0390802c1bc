"""The receiver of weight syncs in vLLM's worker processes.

vLLM imports this file in every worker process, by the name of `WorkerExtension`. Only small plain
data passes `collective_rpc`; tensors arrive by the transport.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig, set_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from megarl.models.lora import ADAPTER
from megarl.resharding import Connection, Receiver, SyncError, SyncSpec, SyncStats, connect
from megarl.rollout.adapter_buffers import activate_adapter, adapter_buffer
from megarl.rollout.decoder_loader import DecoderLoader as DecoderLoader  # registered for vLLM
from megarl.rollout.draft_checks import mend_draft_checks
from megarl.rollout.routes import RouteRecorder
from megarl.rollout.vllm_layers import Layer, running_layer
from megarl.stacks import answer_as_child
from megarl.weights.shard_map import Box, ShardMap, TensorInfo

_BELOW_ADAPTER = ".base_layer"
"""The end of the paths of layers around which vLLM puts a layer with adapters."""


@dataclass(kw_only=True)
class _Parameter:
    """A parameter, possibly of tied layers."""

    info: TensorInfo
    live: torch.Tensor | None
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

    def __init__(
        self,
        model: nn.Module,
        model_config: ModelConfig,
        adapters: Mapping[str, TensorInfo],
    ) -> None:
        self._parameters: dict[str, _Parameter] = {}
        self._layers: list[Layer] = []
        names: dict[int, str] = {}
        # By the projection of which it packs copies on a CPU with AMX, and keeps parts elsewhere.
        latent: dict[nn.Module, MLAAttention] = {}
        for module in model.modules():
            if isinstance(module, MLAAttention):
                latent[module.kv_b_proj] = module
        for path, module in model.named_modules():
            has_none = next(module.parameters(recurse=False), None) is None
            if has_none or isinstance(module, MLAAttention):
                continue
            output = isinstance(module, ParallelLMHead) or module is getattr(model, "lm_head", None)
            computes = output or not isinstance(module, VocabParallelEmbedding)
            layer = running_layer(path, module, model_config, computes=computes)
            if module in latent:
                absorb = latent[module].process_weights_after_loading
                layer.afterwards = partial(absorb, model_config.dtype)
            elif "sinks" in layer.infos:  # of which some kernels have a copy in float32
                attention: Any = module
                layer.afterwards = partial(attention.attn.process_weights_after_loading, model_config.dtype)
            self._layers.append(layer)
            for attribute, info in layer.infos.items():
                parameter = getattr(module, attribute)
                name = names.setdefault(
                    id(parameter),
                    f"{path.removesuffix(_BELOW_ADAPTER)}.{attribute}",
                )
                live = parameter if attribute in layer.in_place else None
                known = self._parameters.setdefault(name, _Parameter(info=info, live=live))
                known.owners.append((layer, attribute))
        for name, info in adapters.items():
            buffer = adapter_buffer(model, name, info.shape)
            dtype = str(buffer.dtype).removeprefix("torch.")
            self._parameters[name] = _Parameter(info=TensorInfo(tuple(buffer.shape), dtype), live=buffer)
        self.begin()

    def check(self, expected: Mapping[str, TensorInfo], *, whole: bool = True) -> None:
        """Compares a sync's parameters with the model's; raises ValueError with every difference.

        Args:
            whole: whether the sync must bring all of them.
        """
        problems: list[str] = []
        for name, info in expected.items():
            if name not in self._parameters:
                problems.append(f"{name}: unknown to vLLM's model")
                continue
            found = self._parameters[name].info
            if found != info:
                problems.append(f"{name}: {found} in vLLM's model, {info} in the shard map")
        for name in self._parameters:
            if whole and name not in expected:
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


class ShardReceiver:
    """A rank's weights and its connection to the trainer.

    Attributes:
        consistent: whether all weights were of one version after the last sync.
    """

    def __init__(self, worker: Any, shard_maps: Sequence[ShardMap], vocab_size: int) -> None:
        """Checks this rank's shard map against the model, and excludes ids from `vocab_size` on.

        Called once, when all ranks have started. vLLM cuts the logits to the `vocab_size` of
        config.json, which may be larger than the vocabulary.
        """
        _unlink_shared_memory()
        model: nn.Module = worker.model_runner.get_model()
        self.consistent = True
        self._device: torch.device = worker.device
        self._tp_rank = get_tensor_model_parallel_rank()
        expected = shard_maps[self._tp_rank].params
        adapters = {name: info for name, info in expected.items() if ADAPTER in name}
        if adapters:
            activate_adapter(worker.model_runner.lora_manager)
        self._weights = EngineWeights(model, worker.model_config, adapters)
        self._weights.check(expected)
        self._connection: Connection | None = None
        self._receiver: Receiver | None = None

        def mask(_module: nn.Module, _args: object, logits: torch.Tensor | None) -> None:
            if logits is not None:  # None on all ranks but one
                logits[..., vocab_size:] = float("-inf")

        for module in model.modules():
            if isinstance(module, LogitsProcessor) and vocab_size < module.org_vocab_size:
                module.register_forward_hook(mask)

    def connect(self, sync: SyncSpec, ranks: Sequence[int], version: int) -> None:
        """Connects to the other ranks of a sync, and waits for all; ends an earlier connection.

        Args:
            ranks: the engine's ranks in the sync, by tensor-parallel rank.
            version: last committed version; -1 before the first.
        """
        self.shutdown()
        rank = ranks[self._tp_rank]
        received = sync.recv_buffers[rank].params
        self._weights.check(received, whole=not all(ADAPTER in name for name in received))
        self._connection = connect(sync, rank, self._device)
        self._receiver = Receiver(self._connection, self._weights.write, version=version)

    def receive(self, version: int) -> SyncStats:
        """Writes this rank's shard as it arrives, until all ranks of the sync have committed the version."""
        if self._connection is None or self._receiver is None:
            raise ValueError("the engine is not connected to the trainer: connect before receiving weights")
        self._weights.begin()
        try:
            stats = self._receiver.receive(version)
            stats.peak_staging_bytes += self._weights.peak_bytes
            return stats
        except SyncError:
            if not self._connection.connected and get_tensor_model_parallel_world_size() > 1:
                self._weights.settle()  # other ranks may be writing
            raise
        finally:
            self.consistent = self._receiver.consistent and not self._weights.settled
            self._weights.begin()

    def release(self) -> None:
        """Frees the memory in which weights arrive, until the next sync."""
        if self._receiver is not None:
            self._receiver.release()

    def shutdown(self) -> None:
        """Ends the connection, if there is one; vLLM's worker calls it at its end."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None
        self._receiver = None


def _unlink_shared_memory() -> None:
    """Removes the names of vLLM's shared memory, which all CPU ranks have mapped: killed ranks would leave them."""
    name = os.environ.get("VLLM_DIST_IDENT")  # vLLM's CPU worker sets it
    if name:
        for path in Path("/dev/shm").glob(f"{name}-*-cpushm_*"):
            path.unlink(missing_ok=True)


class WorkerExtension:
    """A call of the receiver; `self` is vLLM's worker, whose field for a receiver has ours."""

    def megarl_call(self: Any, method: str, *args: Any) -> CallOutcome:
        """Calls a method, or with `prepare` makes the receiver.

        Raises nothing: if a rank raised, vLLM's `mp` executor (0.32) would return the other ranks'
        answers from the next call.
        """
        try:
            with set_current_vllm_config(self.vllm_config):
                if method == "record_routes":
                    if self.rank == 0:
                        self.megarl_routes = RouteRecorder(self.model_runner, *args)
                    return CallOutcome()
                if method == "take_routes":
                    return CallOutcome(value=self.megarl_routes.take(*args) if self.rank == 0 else None)
                if method == "prepare":
                    mend_draft_checks(self.vllm_config)
                    self.weight_transfer_engine = ShardReceiver(self, *args)
                    return CallOutcome()
                return CallOutcome(value=getattr(self.weight_transfer_engine, method)(*args))
        except Exception as error:
            receiver = self.weight_transfer_engine
            return CallOutcome(
                error=traceback.format_exc(),
                aborted=str(error) if isinstance(error, SyncError) else "",
                consistent=receiver is None or receiver.consistent,
            )


_PROCESS = multiprocessing.current_process().name
if _PROCESS.startswith("VllmWorker-"):  # followed by the rank (vLLM 0.32)
    answer_as_child(_PROCESS.replace("VllmWorker", "rank"))
