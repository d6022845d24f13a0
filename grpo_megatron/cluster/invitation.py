"""The invitation of a run: a file with which other Slurm jobs of the user add nodes to its Ray cluster."""

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
    """Let other Slurm jobs of the user add nodes to this run's Ray cluster while the context is open.

    The invitation is the file that the environment variable GRPO_JOIN names. Its first line is the address of
    Ray (HOST:PORT), and its second line is Ray's token, or empty. The file is deleted at the end of the
    context. If GRPO_JOIN is not set, nothing is written.

    Ray must have reserved the devices of the run before. Otherwise ranks might be placed on nodes that join
    later, and the run would end when these nodes leave. Raises UserError if the file cannot be written.
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
        # Anyone with the token can run programs as this user. The folder's access control list may let others
        # read new files. This call revokes that right while the file is still empty.
        os.fchmod(file, 0o600)
        with open(file, "w", encoding="utf-8") as opened:
            opened.write(content)
        os.replace(new, path)
    try:
        yield
    finally:
        Path(path).unlink(missing_ok=True)
