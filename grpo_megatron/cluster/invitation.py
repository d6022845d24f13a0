"""The invitation of a run: a file with which other Slurm jobs of the user add nodes to the run's Ray."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray

from grpo_megatron.files import writing

# Environment variable with the path of the file. slurm/train.sbatch describes it.
VARIABLE = "GRPO_JOIN"


@contextmanager
def invitation() -> Iterator[None]:
    """Keep the invitation within the context, if the environment variable names a file for it.

    Its first line is the address of Ray, and its second line the token. Ray must have reserved the devices of
    the run before: nodes that join would get ranks otherwise, and a run ends with the nodes of its ranks.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        yield
        return
    new = Path(f"{path}.{os.getpid()}")
    content = f"{ray.get_runtime_context().gcs_address}\n{os.environ.get('RAY_AUTH_TOKEN', '')}\n"
    with writing(path):
        new.unlink(missing_ok=True)
        file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        # Whoever has the token can run programs as the user. Folders may have rules by which others can read
        # new files (ACLs), which this call overrides while the file is still empty.
        os.fchmod(file, 0o600)
        with open(file, "w", encoding="utf-8") as opened:
            opened.write(content)
        os.replace(new, path)
    try:
        yield
    finally:
        Path(path).unlink(missing_ok=True)
