"""Weights, checkpoints and reference on a rank: loaded, saved and exported, in any parallel layout."""
