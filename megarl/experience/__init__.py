"""From a step's rollouts to the experience that updates read; pure torch."""
