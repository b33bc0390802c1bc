"""`megarl plan`: plans of runs and of weight transfers, before anything starts."""
