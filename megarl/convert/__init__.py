"""Checkpoints between Hugging Face's layout, Megatron-LM's, and the run directories of MegaRL.

Functions of this package raise UsageError where a conversion cannot be done, and
CheckpointError (of a run: BrokenCheckpointError) where files are missing, damaged or not the
model's.
"""
