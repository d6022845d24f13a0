"""The sandbox for untrusted programs, tried by programs that want to escape.

Each attempt is bounded even if nothing contains it.
"""

import os
import signal
import socket
import tempfile
import time
from pathlib import Path

import pytest

from grpo_megatron.config.sandbox import SandboxLimits
from grpo_megatron.sandbox.program import Ended, Outcome, Program
from grpo_megatron.sandbox.run import Sandbox
from tests.sandboxes import processes
from tests.tools import wait_until

# Of attempts that are (name, function) pairs, the names of those that worked.
TRY = """
def attempt(**attempts):
    for name, function in attempts.items():
        try:
            result = function()
        except (OSError, EOFError) as error:
            continue
        print(name, result)
"""
LIMITS = SandboxLimits(
    seconds=20, cpu_seconds=10, memory_mib=256, threads=16, files_mib=4, files=32, output_kib=64
)


@pytest.fixture
def run(containment, tmp_path, monkeypatch):
    """A function that runs a program, of which nothing is left afterwards. Options are limits."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    os.mkdir(tempfile.tempdir)
    monkeypatch.setenv("SECRET_TOKEN", "hush")
    before = processes()

    def run(source: str, stdin: str = "", within: float | None = None, **limits) -> Outcome:
        with Sandbox(SandboxLimits(**vars(LIMITS) | limits), containment=containment) as sandbox:
            outcome = sandbox.run(Program(TRY + source, stdin), within)
            wait_until(lambda: len(processes() - before) == 1, "more is left than the helper", seconds=10)
        return outcome

    yield run
    assert processes() == before
    assert os.listdir(tempfile.tempdir) == []


def worked(outcome: Outcome) -> list[str]:
    """Return the names of attempts that succeeded."""
    assert outcome.succeeded, outcome
    return [line.split()[0] for line in outcome.stdout.splitlines()]


def test_an_honest_program(run):
    source = (
        "import json, math\nopen('notes', 'w').write('kept')\n"
        "print(int(input()) + 1, open('notes').read(), __name__)"
    )
    outcome = run(source, "41\n")
    assert (outcome.stdout, outcome.stderr, outcome.succeeded) == ("42 kept __main__\n", "", True)
    assert 0 < outcome.seconds < 60


def test_an_error_is_shown_as_python_shows_it(run):
    outcome = run("def f():\n    return 1 / 0\nf()")
    assert (outcome.ended, outcome.status) == (Ended.itself, 1)
    assert "return 1 / 0" in outcome.stderr
    assert outcome.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert "grpo_megatron" not in outcome.stderr
    assert run("exit(3)").status == 3
    assert run("import os\nos.kill(os.getpid(), 11)").status == -11


@pytest.mark.slow
def test_installed_packages_can_be_imported_and_the_project_cannot(run):
    assert run("import numpy\nprint(numpy.arange(4).sum())").stdout == "6\n"
    assert "No module named 'grpo_megatron'" in run("import grpo_megatron").stderr


# -- time ---------------------------------------------------------------------------------------


def test_an_endless_loop(run):
    assert run("while True: pass", cpu_seconds=1, seconds=100).ended == Ended.cpu


@pytest.mark.slow
def test_a_loop_that_ignores_every_signal_it_can(run):
    source = (
        "import signal\n"
        "for s in set(signal.valid_signals()) - {9, 19}: signal.signal(s, signal.SIG_IGN)\n"
        "while True: pass"
    )
    outcome = run(source, cpu_seconds=1, seconds=100)
    assert (outcome.ended, outcome.status) == (Ended.cpu, -signal.SIGKILL)


@pytest.mark.slow
def test_a_program_that_sleeps(run):
    source = "import time\nprint('before', flush=True)\ntime.sleep(5)\nprint('after')"
    for limits in ({"seconds": 1.0, "within": 60}, {"seconds": 60, "within": 1.0}):
        outcome = run(source, **limits)
        assert (outcome.ended, outcome.stdout) == (Ended.time, "before\n")


@pytest.mark.slow
def test_waiting_for_a_processor_is_no_fault_of_the_program(containment):
    """A program that shares its processor with others is ended by its CPU time, not by the clock."""
    processor = min(os.sched_getaffinity(0))
    source = "for i in range(30_000_000): pass"
    with Sandbox(SandboxLimits(seconds=0.5), containment=containment) as sandbox:
        pid = sandbox._helper.pid
        os.sched_setaffinity(pid, {processor})
        rival = os.fork()
        if not rival:
            os.sched_setaffinity(0, {processor})
            # Linux divides a processor among sessions first. In the tests' session it would get less, the
            # more of its processes are busy.
            os.setsid()
            end = time.monotonic() + 60
            while time.monotonic() < end:
                pass
            os._exit(0)
        wait_until(lambda: os.getsid(rival) == rival, "the rival is not there")
        outcome = sandbox.run(Program(source), within=2.0)
        os.kill(rival, signal.SIGKILL)
        os.waitpid(rival, 0)
    assert outcome.ended == Ended.time
    assert outcome.seconds > 0.9  # by half of the processor it is 1.0; ended by the clock, it was up to 0.8


def test_nobody_is_asked_at_stdin(run):
    assert run("input()\ninput()", "one line\n").stderr.endswith("EOFError: EOF when reading a line\n")


# -- memory, files, output ----------------------------------------------------------------------


def test_ten_gigabytes(run):
    outcome = run("b = bytes(10 << 30)")  # by calloc, so never touched
    assert (outcome.ended, outcome.status) == (Ended.memory, 1)


def test_memory_in_small_parts(run):
    # At most 768 MiB where nothing stops it.
    assert run("parts = [b'x' * (1 << 20) for _ in range(768)]").ended == Ended.memory


def test_memory_that_no_limit_would_count(run):
    source = """
import ctypes, os
libc = ctypes.CDLL(None)
attempt(memfd=lambda: os.memfd_create('m'))
print(libc.shmget(0, 1 << 20, 0o1600))
"""
    assert run(source).stdout == "-1\n"


def test_threads(run):
    source = (
        "import threading, time\nfor _ in range(64): threading.Thread(target=time.sleep, args=(5,)).start()"
    )
    assert run(source, memory_mib=1024).ended == Ended.threads
    assert (
        run("import threading\nt = threading.Thread(target=print, args=(1,))\nt.start()\nt.join()").stdout
        == "1\n"
    )


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_huge_output(run, stream):
    outcome = run(f"import sys\nfor _ in range(300): sys.{stream}.write('x' * (1 << 20))")
    assert outcome.ended == Ended.output
    assert getattr(outcome, stream) == "x" * (64 << 10)


def test_a_huge_file(run):
    source = """
size = 0
try:
    with open('huge', 'wb', buffering=0) as file:
        for _ in range(200):
            size += file.write(bytes(1 << 20))
except OSError:
    print(size)
"""
    assert int(run(source).stdout) <= 4 << 20


@pytest.mark.parametrize("size", [0, 1 << 20])
def test_many_files(run, size):
    """The room in a namespace is limited. Otherwise the sandbox checks the size and ends the program."""
    source = f"""
import time
made = 0
try:
    for number in range(64):
        with open(f'file{{number}}', 'wb') as file:
            file.write(bytes({size}))
            made += 1
    time.sleep(5)
except OSError:
    print(made)
"""
    outcome = run(source)
    assert outcome.ended == Ended.files or int(outcome.stdout) <= (4 if size else 32)


# -- other processes ----------------------------------------------------------------------------


def test_no_further_process(run):
    """A fork bomb, a daemon and a shell all begin with one process, of which there would be ten, for two
    seconds.
    """
    source = """
import ctypes, multiprocessing, os, subprocess, time
def fork():
    pid = os.fork()
    if not pid:
        time.sleep(2)
        os._exit(0)
    return pid
def shell():
    if os.system('true'):
        raise OSError
for _ in range(10):
    attempt(fork=fork, vfork=lambda: os.posix_spawn('/bin/true', ['true'], {}))
attempt(shell=shell, child=lambda: subprocess.run(['true']), pool=lambda: multiprocessing.Pool(2))
"""
    assert worked(run(source)) == []


def test_other_processes_are_out_of_reach(run):
    source = f"""
import ctypes, os, resource, signal
libc = ctypes.CDLL(None, use_errno=True)
def ptrace():
    if libc.ptrace(16, other, 0, 0):
        raise OSError
other = {os.getpid()}
for other in (other, os.getppid()):
    attempt(
        kill=lambda: os.kill(other, 0),
        group=lambda: os.kill(0, 0),
        pidfd=lambda: os.pidfd_open(other),
        limit=lambda: resource.prlimit(other, resource.RLIMIT_NOFILE),
        processors=lambda: os.sched_setaffinity(other, {{0}}),
        priority=lambda: os.setpriority(os.PRIO_PROCESS, other, 19),
        ptrace=ptrace,
        memory=lambda: open(f'/proc/{{other}}/mem'),
        signal_of_a_file=lambda: __import__('fcntl').fcntl(0, 8, other),
    )
"""
    assert worked(run(source)) == []


def test_no_secret_is_seen(run, tmp_path):
    secret = tmp_path / "token"
    secret.write_text("hush")
    source = f"""
import os
print(os.environ)
attempt(
    own=lambda: open('/proc/self/environ').read(),
    parent=lambda: open(f'/proc/{{os.getppid()}}/environ').read(),
    run=lambda: open('/proc/{os.getpid()}/environ').read(),
    file=lambda: open({str(secret)!r}).read(),
    users=lambda: open('/etc/passwd').read(),
    home=lambda: os.listdir({str(Path.home())!r}),
)
"""
    outcome = run(source)
    assert "hush" not in outcome.stdout
    # A home folder may have the interpreter in it, and nothing else is seen of it.
    assert [line for line in outcome.stdout.splitlines()[1:] if not line.startswith("home")] == []


def test_nothing_is_written_outside(run, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    file = outside / "file"
    file.write_text("as it was")
    before = file.stat()
    source = f"""
import os
path = {str(file)!r}
attempt(
    write=lambda: open(path, 'w'),
    append=lambda: open(path, 'a'),
    truncate=lambda: os.truncate(path, 0),
    mode=lambda: os.chmod(path, 0),
    times=lambda: os.utime(path, (1, 1)),
    owner=lambda: os.chown(path, 7, 7),
    attributes=lambda: os.setxattr(path, 'user.x', b'1'),
    remove=lambda: os.remove(path),
    rename=lambda: os.rename(path, 'mine'),
    link=lambda: os.link(path, 'mine'),
    other=lambda: open(path + '2', 'w'),
    folder=lambda: os.mkdir(path + '3'),
    root=lambda: open('/new', 'w'),
    system=lambda: open('/usr/new', 'w'),
    packages=lambda: open(__import__('numpy').__file__, 'a'),
)
"""
    assert worked(run(source)) == []
    after = file.stat()
    assert file.read_text() == "as it was"
    assert [path.name for path in outside.iterdir()] == ["file"]
    assert (after.st_mode, after.st_mtime, after.st_uid, after.st_nlink) == (
        before.st_mode,
        before.st_mtime,
        before.st_uid,
        before.st_nlink,
    )


def test_no_network(run, tmp_path):
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as local,
    ):
        server.settimeout(0.2)
        local.settimeout(0.2)
        path = str(tmp_path / "socket")
        local.bind(path)
        source = f"""
import ctypes, socket
loopback, local = {server.getsockname()!r}, {path!r}
def unix():
    socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'x', local)
def pair():
    socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', local)
def ring():
    if ctypes.CDLL(None).syscall(425, 8, bytes(120)) < 0:
        raise OSError
attempt(
    loopback=lambda: socket.create_connection(loopback, 2),
    outside=lambda: socket.create_connection(('192.0.2.1', 80), 2),
    ipv6=lambda: socket.socket(socket.AF_INET6),
    netlink=lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),
    unix=unix, pair=pair, ring=ring,
)
a, b = socket.socketpair()
a.sendall(b'kept')
print('own', b.recv(4))
"""
        assert run(source).stdout == "own b'kept'\n"
        with pytest.raises(TimeoutError):
            server.accept()
        with pytest.raises(TimeoutError):
            local.recv(1)


def test_it_has_no_rights_that_could_give_it_others(run):
    source = """
import ctypes, os
libc = ctypes.CDLL(None)
def check(result):
    if result < 0:
        raise OSError
attempt(
    namespace=lambda: check(libc.unshare(0x10000000)),
    mount=lambda: check(libc.mount(b'none', b'/', None, 1 << 14, None)),
    root=lambda: os.chroot('.'),
    user=lambda: os.setuid(4242),
    survive=lambda: check(libc.prctl(1, 0, 0, 0, 0)),
    bpf=lambda: check(libc.syscall(321, 0, 0, 0)),
)
"""
    assert worked(run(source)) == []
