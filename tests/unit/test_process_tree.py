"""The process that a record means. The number alone may belong to another one."""

import os
import re
import subprocess
import sys

import psutil
import pytest

from grpo_megatron.process_tree import is_running, start_mark

HELD = (
    "import ctypes, sys; ctypes.CDLL(None).prctl(15, sys.argv[1].encode(), 0, 0, 0); "
    "print(flush=True); sys.stdin.read()"
)


@pytest.mark.parametrize("name", ["plain", "a) S (b 1 2"])
def test_a_process_is_known_by_its_start_whatever_its_name(name):
    process = subprocess.Popen(
        [sys.executable, "-c", HELD, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    process.stdout.readline()
    mark = start_mark(process.pid)
    try:
        assert psutil.Process(process.pid).name() == name
        assert re.fullmatch(r"[0-9a-f-]*:\d+", mark)
        ticks = int(mark.partition(":")[2])
        began = ticks / os.sysconf("SC_CLK_TCK") + psutil.boot_time()
        assert abs(began - psutil.Process(process.pid).create_time()) < 2
        assert is_running(process.pid, mark)
        assert not is_running(os.getpid(), mark)
    finally:
        process.communicate()
    assert start_mark(process.pid) is None
    assert not is_running(process.pid, mark)


@pytest.mark.parametrize(
    ("pid", "started"), [(None, None), ("?", "boot:1"), (True, 1.0), (-1, "boot:1"), (2**40, 1.0), ([], {})]
)
def test_what_is_no_record_is_not_running(pid, started):
    assert not is_running(pid, started)
