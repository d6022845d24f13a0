"""Sections of benchmarks/gpu.py. Each runs in a process of its own."""
