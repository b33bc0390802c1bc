"""Moves weights between running processes by a plan: plain tensors, neither Megatron nor vLLM."""

from megarl.resharding.receiver import Receiver
from megarl.resharding.records import SyncError, SyncSpec, SyncStats
from megarl.resharding.sender import Sender
from megarl.resharding.transport import GlooTransport, Transport, serve_store

__all__ = [
    "GlooTransport",
    "Receiver",
    "Sender",
    "SyncError",
    "SyncSpec",
    "SyncStats",
    "Transport",
    "serve_store",
]
