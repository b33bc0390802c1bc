"""The node agent: what runs once on every node of a Slurm job, and makes one Ray and one run of them."""
