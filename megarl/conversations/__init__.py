"""Conversations between models and environments. Token ids are kept as sampled; nothing is tokenized twice."""
