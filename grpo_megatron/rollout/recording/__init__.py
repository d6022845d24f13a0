"""Recordings of rollouts: folders with the samples of each step, for training on them again.

A recording has a header `recording.json`. A step consists of a file step_00000001.json with rows, and of one
file step_00000001_worker0.safetensors for each rollout worker, with arrays and texts of the samples that the
worker made. The file with the rows is written last. A step without it does not exist.

No file contains code that loading it could run.
"""
