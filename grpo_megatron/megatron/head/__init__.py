"""Heads of the model: log-probs with entropy and KL, or scores, and the losses that are made of them."""
