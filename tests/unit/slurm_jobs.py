"""Helpers of tests of slurm/submit.py: run it, and read the job's script."""

import subprocess

from render import Job
from submit import main

HOSTILE = """it's "$HOME" \\ `id` #1 * ; $(false) %j {task}"""
JOB = Job(
    "run",
    2,
    "/runs/run",
    "/here",
    "/env/bin",
    ["--config", "a.yaml", f"model.path={HOSTILE}"],
    cpus_per_node=3,
)
# A model of which nothing is on this machine.
ABSENT = "model.path=/nowhere"
EVALUATION = ("--config", "configs/qwen3_8b_1node.yaml", "--command", "eval", "data.eval=e.jsonl", ABSENT)


def submit(capsys, *arguments, status=0):
    """Return the standard output, or the message if it fails."""
    assert main([str(argument) for argument in arguments]) == status
    captured = capsys.readouterr()
    return captured.err if status else captured.out


def header(script: str) -> list[str]:
    """Return the arguments of sbatch in a script."""
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


def shell_words(script: str, expression: str) -> list[str]:
    """Return the words that bash makes of `expression`, such as "$@", after the head of a script that
    needs no Slurm.
    """
    head = script.partition("\nset -euo pipefail\n")[0]
    shown = subprocess.run(
        ["bash", "-c", f"{head}\nprintf '%s\\0' {expression}"], capture_output=True, text=True, check=True
    )
    return shown.stdout.split("\0")[:-1]
