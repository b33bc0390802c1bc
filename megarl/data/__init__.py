"""Reading, scheduling and packing of training data."""
