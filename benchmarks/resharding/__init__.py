"""The parts of ``benchmarks.reshard``."""
