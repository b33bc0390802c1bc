"""Moves weights between running processes by a plan: plain tensors, without Megatron or vLLM."""

from megarl.resharding.receiver import Load, Receiver
from megarl.resharding.sender import Sender
from megarl.resharding.spec import ConnectRequest, SyncSpec
from megarl.resharding.sync_barrier import SyncError, SyncStats, serve_store
from megarl.resharding.wire import Connection, connect
from megarl.weights.topology import Place

__all__ = [
    "ConnectRequest",
    "Connection",
    "Load",
    "Place",
    "Receiver",
    "Sender",
    "SyncError",
    "SyncSpec",
    "SyncStats",
    "connect",
    "serve_store",
]
