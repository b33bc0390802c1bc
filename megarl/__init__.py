"""MegaRL: Megatron-based, 3D-parallel reinforcement learning from feedback."""

__version__ = "0.1.0"
