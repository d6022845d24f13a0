"""SGLang's files in memory: which are removed, and which stay."""

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from grpo_megatron.sglang.node import Children
from grpo_megatron.sglang.start import unlink_files_of_the_dead

# Maps the files that it is given, says so, and stays.
MAPPING = """
import mmap, sys
files = [open(path, "rb+") for path in sys.argv[1:]]
kept = [mmap.mmap(file.fileno(), 16) for file in files]
print("mapped", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def in_memory():
    """A function that makes a file of 16 bytes in /dev/shm. A * in its name becomes random."""
    made = []

    def make(pattern: str) -> Path:
        path = Path("/dev/shm", pattern.replace("*", uuid.uuid4().hex))
        path.write_bytes(bytes(16))
        made.append(path)
        return path

    yield make
    for path in made:
        path.unlink(missing_ok=True)


def process(title: str, *arguments) -> subprocess.Popen:
    return subprocess.Popen(
        [title, "-c", MAPPING, *map(str, arguments)],
        executable=sys.executable,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def test_what_an_engine_shares_loses_its_name_and_nothing_else_does(in_memory):
    queue, loads = in_memory("sgl_shm_mq_1_*"), in_memory("sglang_loads_*.shm")
    others = in_memory("sgl_shm_mq_1_*"), in_memory("plasma*")
    ended = process(
        "sglang::detokenizer"
    )  # nobody has waited for it, so that it is a zombie, of which no title is known
    ended.kill()
    own, stranger = process("sglang::scheduler", queue, loads, others[1]), process("another", others[0])
    with ended, own, stranger:
        assert own.stdout.readline() == stranger.stdout.readline() == b"mapped\n"
        children = Children()
        assert children.pids == [own.pid]
        children.unlink_shared_files()
        assert not queue.exists()
        assert not loads.exists()
        assert all(path.exists() for path in others)
    children.unlink_shared_files()  # of processes that are gone, which is no error


def test_files_of_engines_that_died_in_their_start_go_at_the_next_start(in_memory):
    with process("gone") as gone:
        pass
    dead, young = in_memory(f"sgl_shm_mq_{gone.pid}_*"), in_memory(f"sgl_shm_mq_{gone.pid}_*")
    others = [
        in_memory(f"sgl_shm_mq_{os.getpid()}_*"),
        in_memory("sgl_shm_*"),
        in_memory(f"another_{gone.pid}_*"),
    ]
    for path in (dead, *others):
        os.utime(path, times=(0, 0))
    unlink_files_of_the_dead()
    assert not dead.exists()
    assert all(path.exists() for path in (young, *others))
