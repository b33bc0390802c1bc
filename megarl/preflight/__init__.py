"""Checks before a run starts: models, data and functions."""
