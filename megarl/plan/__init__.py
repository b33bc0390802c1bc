"""`megarl plan`: what a run, or a transfer of weights, would do, before anything starts."""
