"""Direct preference optimization: training of a policy on preferences, without a reward model."""
