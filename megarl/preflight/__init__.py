"""What is checked before anything starts: models, data and functions."""
