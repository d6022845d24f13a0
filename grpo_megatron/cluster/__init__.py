"""Processes of a run: where they run, how they are called, and what happens when one dies."""
