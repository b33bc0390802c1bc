"""The training loops, which read as the algorithm."""
