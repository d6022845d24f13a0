"""Processes: where they run, how they are called, what happens when one dies."""
