"""What runs inside vLLM's worker processes, one per tensor-parallel rank: the receiving end of a weight sync.

vLLM mixes :class:`WorkerExtension` into its worker class by name (``worker_extension_cls``), in its own process as in
those that it spawns. Only small plain data crosses ``collective_rpc``: specs, names, numbers. Tensors arrive through
the transport.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.logits_processor import LogitsProcessor

from megarl.resharding import GlooTransport, Receiver, SyncSpec, SyncStats
from megarl.rollout.live_weights import LiveWeights
from megarl.weights.regions import ShardMap


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a call on a worker came to.

    Args:
        value: what it returned.
        error: the traceback; empty where it returned.
    """

    value: Any = None
    error: str = ""


class WorkerExtension:
    """Adds one method to vLLM's worker class."""

    def megarl_call(self: Any, method: str, args: tuple[Any, ...]) -> Outcome:
        """Calls a method of this rank's WorkerWeights; ``self`` is vLLM's worker.

        An exception comes back as a value: when a rank raises, vLLM's ``mp`` executor (0.32) leaves the other ranks'
        answers unread, and the next call would get them.
        """
        try:
            if not hasattr(self, "_megarl_weights"):
                self._megarl_weights = WorkerWeights(self.get_model(), self.rank)
            return Outcome(value=getattr(self._megarl_weights, method)(*args))
        except Exception:
            return Outcome(error=traceback.format_exc())


class WorkerWeights:
    """One rank's weights, and its end of the transport.

    Args:
        model: the worker's model, after loading.
        tp_rank: the worker's rank in its engine.
    """

    def __init__(self, model: nn.Module, tp_rank: int) -> None:
        self._model = model
        self._tp_rank = tp_rank
        self._live = LiveWeights(model)
        self._transport: GlooTransport | None = None
        self._receiver: Receiver | None = None

    def prepare(self, shard_maps: Sequence[ShardMap], vocab_size: int) -> None:
        """Checks the map of this rank against the model, and keeps ids that mean nothing from being sampled.

        Called once, when all ranks have started. vLLM cuts the logits to the ``vocab_size`` of config.json; a
        checkpoint's may be larger than its vocabulary.

        Args:
            shard_maps: by tensor-parallel rank.
            vocab_size: ids from here on have probability zero.
        """
        _unlink_shared_memory()
        self._live.check(shard_maps[self._tp_rank].params)

        def mask(_module: nn.Module, _args: object, logits: torch.Tensor | None) -> None:
            if logits is not None:  # only one rank has them
                logits[..., vocab_size:] = float("-inf")

        for module in self._model.modules():
            if isinstance(module, LogitsProcessor) and vocab_size < module.org_vocab_size:
                module.register_forward_hook(mask)

    def connect(self, sync: SyncSpec, ranks: Sequence[int], version: int) -> None:
        """Connects with the other ranks of a sync; waits for all of them. Ends an earlier connection.

        Args:
            sync: with this engine's parts of the plan.
            ranks: the engine's ranks in the sync, by tensor-parallel rank.
            version: the last committed one.

        Raises:
            ValueError: the plan does not describe this model.
        """
        self.disconnect()
        rank = ranks[self._tp_rank]
        plan = sync.receivers[rank]
        self._live.check(plan.params)
        self._transport = GlooTransport(sync, rank)
        self._receiver = Receiver(plan, self._transport, self._live.write, verify=sync.verify, version=version)

    def receive(self, version: int) -> SyncStats:
        """Writes this rank's shard as it arrives; returns when all ranks of the sync have committed the version."""
        if self._receiver is None:
            raise ValueError("the engine is not connected to the trainer: connect before receiving weights")
        return self._receiver.receive(version)

    def consistent(self) -> bool:
        """Whether the weights are all of one version."""
        return self._receiver is None or self._receiver.consistent

    def disconnect(self) -> None:
        """Ends the connection, where there is one."""
        if self._transport is not None:
            self._transport.close()
        self._transport = self._receiver = None


def _unlink_shared_memory() -> None:
    """Removes the names of the memory through which vLLM's CPU ranks reduce.

    All ranks have mapped it when they have started; one that is killed, as a slow one is at the end, would leave it.
    """
    if name := os.environ.get("VLLM_DIST_IDENT"):  # vLLM's CPU worker sets it
        for path in Path("/dev/shm").glob(f"{name}-*-cpushm_*"):
            path.unlink(missing_ok=True)
