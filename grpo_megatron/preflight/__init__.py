"""Checks that find errors of a run before it starts. This package may import every other one."""
