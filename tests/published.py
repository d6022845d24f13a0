"""The environment that has verifiers, for tests with its real environment server (`make verifiers`)."""

from pathlib import Path

import pytest

PYTHON = Path(__file__).parents[1] / ".venv-verifiers/bin/python"
TASK_SETS = Path(__file__).parent / "unit/task_sets"

needs_verifiers = pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-verifiers: run `make verifiers`")


def on_this_machine(role: str, **taskset) -> dict:
    """Return verifiers' section `env` for an agent that only chats, in a process on this machine.

    role: name of the agent in the environment.
    taskset: settings of the task set.
    """
    return {"taskset": taskset, role: {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}


def words_for_games(root: Path) -> Path:
    """Write NLTK's lists of words, which games of TextArena would download, and return their folder."""
    words = root / "nltk_data/corpora/words"
    words.mkdir(parents=True)
    for name in ("README", "en", "en-basic"):
        (words / name).write_text("river\n")
    return root / "nltk_data"
