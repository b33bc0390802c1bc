"""The node agent: runs once on every node of a Slurm job, and makes one Ray cluster and one run of them."""
