"""Rollouts with vLLM: engines, sampling, and the receiving side of a weight sync. The only importer of vLLM."""
