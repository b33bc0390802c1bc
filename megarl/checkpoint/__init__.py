"""Checkpoints of runs: staged by every rank, verified by the driver, committed by one rename."""

from megarl.checkpoint.manifest import BrokenCheckpointError, CheckpointManifest
from megarl.checkpoint.store import Checkpoint, Checkpoints

__all__ = ["BrokenCheckpointError", "Checkpoint", "CheckpointManifest", "Checkpoints"]
