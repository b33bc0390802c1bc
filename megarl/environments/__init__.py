"""Environments: what a conversation's model talks to. Token ids are kept as sampled; nothing is tokenised twice."""
