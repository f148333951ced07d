"""Training: the loop, freezing, checkpoints, and measurement of held-out text."""
