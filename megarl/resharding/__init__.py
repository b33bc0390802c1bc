"""Moves weights between running processes by a plan, as plain tensors, without Megatron or vLLM."""

from megarl.resharding.connection import connect
from megarl.resharding.spec import ConnectRequest, SyncSpec
from megarl.resharding.sync_barrier import BarrierWatch, SyncError, SyncStats, serve_store
from megarl.resharding.sync_rank import Receiver, Sender
from megarl.resharding.transfers.transfer import Connection, WeightTransfer

__all__ = [
    "BarrierWatch",
    "ConnectRequest",
    "Connection",
    "Receiver",
    "Sender",
    "SyncError",
    "SyncSpec",
    "SyncStats",
    "WeightTransfer",
    "connect",
    "serve_store",
]
