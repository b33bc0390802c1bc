"""Ray: a run's processes, their placement and the calls on them. The only package that imports ray."""
