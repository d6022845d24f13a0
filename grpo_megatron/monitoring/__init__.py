"""Monitoring of a run: its scalars, texts, timeline, status, and lines on the terminal."""
