"""Shard maps, the transfer planner, and Hugging Face files."""
