"""Transactional run checkpoints: staged by every rank, verified by the driver, committed by one rename."""

from megarl.checkpoint.manifest import BrokenCheckpointError, Manifest
from megarl.checkpoint.store import Checkpoint, Checkpoints

__all__ = ["BrokenCheckpointError", "Checkpoint", "Checkpoints", "Manifest"]
