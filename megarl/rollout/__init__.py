"""Rollouts with vLLM: engines, sampling, and the receivers of weight syncs. The only importer of vLLM."""
