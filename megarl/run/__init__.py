"""A run's directory: its resume point, results, reports and attempts."""
