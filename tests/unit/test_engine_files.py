"""SGLang's files in memory: which are removed, and which stay."""

import os
import subprocess
import sys
import time
import uuid
from importlib import util
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from grpo_megatron.sglang.node import Children
from grpo_megatron.sglang.release import unname_reports
from grpo_megatron.sglang.start import unlink_files_of_the_dead
from tests.tools import unpacked

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


@pytest.fixture
def load_snapshot(monkeypatch, request) -> ModuleType:
    """SGLang's own module of the reports, without the rest of SGLang, which takes long to import."""
    release = request.param
    place = unpacked(release) if release else Path(util.find_spec("sglang").origin).parents[1]
    instead = {
        "sglang.srt.environ": SimpleNamespace(envs=None),
        "sglang.srt.runtime_context": SimpleNamespace(get_parallel=None, get_serving=None),
        "sglang.srt.utils.network": SimpleNamespace(
            is_zmq_endpoint_ipv6=lambda endpoint: False,
            restrict_zmq_peers=None,  # for tcp
            zmq_connect=lambda socket, endpoint: socket.connect(endpoint),
        ),
    }
    for name, module in instead.items():
        monkeypatch.setitem(sys.modules, name, module)
    spec = util.spec_from_file_location("load_snapshot", place / "sglang/srt/managers/load_snapshot.py")
    module = util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "load_snapshot", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("load_snapshot", ["sglang==0.5.17", None], indirect=True)
def test_reports_from_several_nodes_leave_no_file(load_snapshot, in_memory, tmp_path):
    """Their file comes into being when all others have lost their names, and used to stay."""
    path, endpoint = in_memory("sglang_loads_*.shm"), f"ipc://{tmp_path}/reports"
    path.unlink()
    reader = load_snapshot.ZmqShmLoadSnapshotReader(endpoint, str(path), 2)
    unname_reports(reader)
    writers = [load_snapshot.ZmqLoadSnapshotWriter(endpoint, 2, rank) for rank in range(2)]
    assert reader.read_all() == []
    found, end = {}, time.monotonic() + 60
    while found != {0: 5, 1: 6}:
        assert time.monotonic() < end
        for rank, writer in enumerate(writers):
            writer.write(load_snapshot.LoadSnapshot(dp_rank=rank, num_running_reqs=5 + rank))
            time.sleep(0.01)
            found = {report.dp_rank: report.num_running_reqs for report in reader.read_all()}
    assert not path.exists()
    for one in (reader, *writers):
        one.close()
