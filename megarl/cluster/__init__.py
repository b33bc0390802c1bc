"""Ray: the processes of a run, where they stand, and the calls on them. The only package that imports ray."""
