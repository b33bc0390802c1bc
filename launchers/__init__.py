"""Experiment scripts for NeMo-Run: ``python -m launchers.ppo``, ``launchers.pipeline`` and ``launchers.sweep``."""
