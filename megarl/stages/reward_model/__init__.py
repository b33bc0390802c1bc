"""Training of a reward model on preferences."""
