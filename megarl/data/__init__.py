"""Prompts, schedules and packing: what is trained on, by whom, in which order."""
