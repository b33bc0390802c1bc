"""The driver's time per turn of conversations."""
