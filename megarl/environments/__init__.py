"""Environments of the conversations with a model."""
