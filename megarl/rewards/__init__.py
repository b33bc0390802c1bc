"""Rule-based rewards: what a function sees of a response, the built-in ones, and how users name their own."""
