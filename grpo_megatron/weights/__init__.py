"""Weights in three name spaces, and their ways between them."""
