"""Evaluation of a checkpoint."""
