"""The node agent: runs once on every node of a Slurm job, and starts its Ray and the run."""
