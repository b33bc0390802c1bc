"""PPO and its relatives: training on the actor's own responses."""
