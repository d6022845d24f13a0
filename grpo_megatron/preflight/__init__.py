"""Checks that find errors of a run before it starts. This package may import all other packages."""
