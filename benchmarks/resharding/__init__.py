"""The parts of ``benchmarks/reshard.py``."""
