"""Submits runs to clusters, and runs them on the nodes of a Slurm job."""
