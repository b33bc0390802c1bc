"""Moves weights between running processes by a plan: plain tensors, neither Megatron nor vLLM."""

from megarl.resharding.board import serve_store
from megarl.resharding.connection import Connection, connect
from megarl.resharding.receiver import Load, Receiver
from megarl.resharding.records import SyncError, SyncStats
from megarl.resharding.sender import Sender
from megarl.resharding.spec import SyncSpec
from megarl.weights.places import Place

__all__ = [
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
