"""A run's directory: its results, reports and attempts, and reading them again."""
