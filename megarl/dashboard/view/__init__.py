"""The page of a run: `megarl view`."""
