"""Environments: what a conversation's model talks to."""
