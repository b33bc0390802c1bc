"""Adapters from the cases of vectors.json to megarl.algos; each module covers some of the file's functions."""
