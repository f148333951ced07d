"""The model: one Block, one LM, its cache, its files, and greedy generation."""
