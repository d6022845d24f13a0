"""The sections of benchmarks/gpu.py; each runs in a process of its own."""
