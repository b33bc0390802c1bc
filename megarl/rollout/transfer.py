"""The receiving end of a weight sync, as vLLM hosts it: a weight-transfer engine in every worker process."""

from __future__ import annotations

import os
import traceback
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor

from megarl.resharding import Connection, Receiver, SyncError, SyncSpec, connect
from megarl.rollout.live_weights import LiveWeights
from megarl.weights.regions import ShardMap


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
