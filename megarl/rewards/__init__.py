"""Reward functions: built-in ones and the user's own, called in a process that can be ended."""
