"""A sandbox for untrusted programs, such as those that a model wrote.

Callers use `run.py`. It starts a helper process (`helper.py`). The helper forks one process per program
(`child.py`), contains it (`contain.py`, with `namespaces.py`, `landlock.py` and `system_calls.py`) and ends
it at its limits. `harness.py` runs inside the contained process: it executes the program, calls its function
or serves its tests. A helper is started for each sandbox, so the helper's modules import little.
"""
