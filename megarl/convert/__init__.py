"""Checkpoints between Hugging Face's layout, Megatron-LM's, and the run directories of MegaRL."""
