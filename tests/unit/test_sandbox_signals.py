"""Programs in the sandbox that try to signal other processes, and ordinary ones with the same calls."""

import os
import platform
import pty
import signal
import subprocess
import sys
import tempfile
import threading

import pytest

from grpo_megatron.sandbox.contain import NOTHING
from grpo_megatron.sandbox.program import Outcome, Program
from grpo_megatron.sandbox.run import Sandbox

# Writes the number of each signal that it gets. It waits for one at a time, and of those that are pending the
# lowest comes first.
_VICTIM = """
import signal
every = signal.valid_signals()
signal.pthread_sigmask(signal.SIG_BLOCK, every)
print("ready", flush=True)
while True:
    print(int(signal.sigwait(every)), flush=True)
"""
_LAST = signal.SIGRTMAX


class Victim:
    """A process of the same user, in a session of its own with a terminal, that records the signals it
    gets.
    """

    def __init__(self):
        self.terminal, self._other_end = pty.openpty()
        self.terminal_path = os.ttyname(self._other_end)
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", _VICTIM],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # Opening a terminal makes it that of a session which has none.
            preexec_fn=lambda: os.close(os.open(self.terminal_path, os.O_RDWR)),
        )
        self.pid = self._process.pid
        assert self._process.stdout.readline() == "ready\n"

    def signals(self) -> list[int]:
        """Return the signals that it has received so far."""
        self._process.send_signal(_LAST)
        found = []
        while (line := self._process.stdout.readline()) not in ("", f"{int(_LAST)}\n"):
            found.append(int(line))
        assert self._process.poll() is None
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        os.close(self._other_end)
        os.close(self.terminal)


@pytest.fixture
def victim():
    one = Victim()
    yield one
    one.close()


def run(containment: str, source: str) -> Outcome:
    with Sandbox(containment=containment) as sandbox:
        return sandbox.run(Program(source))


# Prints the name of each attempt that was not refused. A filter answers EPERM, or ENOSYS as for a call that
# the kernel has not.
_ATTACK = """
import ctypes, errno, fcntl, os, resource, signal, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
victim, x86 = {pid}, os.uname().machine == "x86_64"
ours, theirs = socket.socketpair()
read_end, write_end = os.pipe()
fd, number = ours.fileno(), ctypes.byref(ctypes.c_int(victim))
FILTERED = (errno.EPERM, errno.EACCES, errno.ENOSYS)  # the C library calls an EPERM of mq_unlink EACCES

def attempt(name, action, *refusals):
    ctypes.set_errno(0)
    try:
        failed = ctypes.get_errno() if action() == -1 else None
    except OSError as error:
        failed = error.errno
    if failed not in (refusals or FILTERED):
        print(name, failed, flush=True)

def call(x86_number, arm_number, *arguments):
    return lambda: libc.syscall(ctypes.c_long(x86_number if x86 else arm_number), *map(wide, arguments))

def wide(argument):
    return ctypes.c_long(argument) if isinstance(argument, int) else argument

def ioctl(request, argument=number, descriptor=fd):
    return lambda: libc.ioctl(descriptor, ctypes.c_ulong(request), argument)
"""
_ATTEMPTS = """
group = ctypes.byref(ctypes.c_int(-victim))
own = ctypes.byref(ctypes.c_int(os.getppid()))
attempt("FIOSETOWN", ioctl(0x8901))
attempt("FIOSETOWN of a group", ioctl(0x8901, group))
attempt("FIOSETOWN of the watcher", ioctl(0x8901, own))
attempt("SIOCSPGRP", ioctl(0x8902))
attempt("SIOCSPGRP with bits that the kernel drops", ioctl(0x7_0000_8902))
attempt("SIOCSPGRP by its number", call(16, 29, fd, 0x8902, number))
attempt("FIOSETOWN of the other end", ioctl(0x8901, number, theirs.fileno()))
attempt("FIOASYNC", ioctl(0x5452))
attempt("FIOASYNC of a pipe", ioctl(0x5452, number, read_end))
attempt("TIOCSCTTY", ioctl(0x540E))
attempt("TIOCSPGRP", ioctl(0x5410))
attempt("TIOCSTI", ioctl(0x5412, b"\\x03"))
attempt("TIOCNOTTY", ioctl(0x5422))
attempt("TIOCVHANGUP", ioctl(0x5437))
attempt("TIOCSIG", ioctl(0x40045436))
attempt("F_SETOWN", lambda: fcntl.fcntl(fd, 8, victim))
attempt("F_SETOWN of a group", lambda: fcntl.fcntl(fd, 8, -victim))
attempt("F_SETOWN with bits that the kernel drops", call(72, 25, fd, 0x1_0000_0008, victim))
attempt("F_SETOWN_EX", lambda: fcntl.fcntl(fd, 15, struct.pack("ii", 1, victim)))
attempt("F_SETSIG", lambda: fcntl.fcntl(fd, 10, signal.SIGKILL))
attempt("F_SETLEASE", lambda: fcntl.fcntl(os.open("leased", os.O_CREAT), 1024, 1))
attempt("F_NOTIFY", lambda: fcntl.fcntl(os.open(".", os.O_RDONLY), 1026, 2))
attempt("F_SETFL", lambda: fcntl.fcntl(fd, 4, os.O_ASYNC | os.O_NONBLOCK))
attempt("F_SETFL of a pipe", lambda: fcntl.fcntl(read_end, 4, os.O_ASYNC))
attempt("kill", lambda: os.kill(victim, signal.SIGTERM))
attempt("kill of a group", lambda: os.killpg(victim, signal.SIGTERM))
attempt("kill of its own group", lambda: os.kill(0, 0))
attempt("kill of everyone", lambda: os.kill(-1, 0))
attempt("tkill", call(200, 130, victim, 15))
attempt("tgkill", call(234, 131, victim, victim, 15))
attempt("rt_sigqueueinfo", call(129, 138, victim, 15, bytes(128)))
attempt("rt_tgsigqueueinfo", call(297, 240, victim, victim, 15, bytes(128)))
attempt("pidfd_open", call(434, 434, victim, 0))
attempt("pidfd_send_signal", call(424, 424, os.open(".", os.O_RDONLY), 15, None, 0))
attempt("pidfd_getfd", call(438, 438, fd, 0, 0))
attempt("ptrace", call(101, 117, 16, victim, 0, 0))
attempt("process_vm_writev", call(311, 271, victim, None, 0, None, 0, 0))
attempt("perf_event_open", call(298, 241, bytes(128), victim, -1, -1, 0))
attempt("io_uring_setup", call(425, 425, 8, bytes(120)))
attempt("userfaultfd", call(323, 282, 0))
attempt("mq_notify", call(244, 184, 0, None))
attempt("mq_unlink", lambda: libc.mq_unlink(b"/queue"))
attempt("shmat", call(30, 196, 0, None, 0))
attempt("semctl", call(66, 191, 0, 0, 0, 0))
attempt("msgsnd", call(69, 189, 0, bytes(16), 0, 0o4000))
# struct sigevent: the value, the signal, SIGEV_THREAD_ID, the thread. The kernel takes threads of the same \
process only.
event = struct.pack("qiii44x", 0, signal.SIGTERM, 4, victim)
attempt("timer_create", call(222, 107, 1, event, bytes(8)), errno.EINVAL)
attempt("prctl(PR_SET_PDEATHSIG)", lambda: libc.prctl(1, 9, 0, 0, 0))
attempt("prctl(PR_SCHED_CORE)", lambda: libc.prctl(62, 2, victim, 0, 0))
attempt("setsid", os.setsid)
attempt("setpgid", lambda: os.setpgid(0, os.getppid()))
if x86:
    attempt("kill by its x32 number", call(0x4000003E, None, victim, 15))
    attempt("ioctl by its x32 number", call(0x40000202, None, fd, 0x8901, number))
ours.send(b"x", socket.MSG_OOB)
theirs.send(b"x")
os.write(write_end, b"x")
assert os.getpgrp() == os.getpid()
"""


def test_no_call_makes_the_kernel_signal_another_process(any_containment, victim):
    """A program could name any process of its user as a socket's owner (ioctl FIOSETOWN), and SIGIO ended
    that.
    """
    outcome = run(any_containment, _ATTACK.format(pid=victim.pid) + _ATTEMPTS)
    assert (outcome.stdout, outcome.stderr, outcome.status) == ("", "", 0)
    assert victim.signals() == []


_ON_A_TERMINAL = """
terminal = os.open({path!r}, os.O_RDWR | os.O_NOCTTY)
attempt("O_ASYNC", lambda: fcntl.fcntl(terminal, 4, os.O_ASYNC))
attempt("FIOASYNC", ioctl(0x5452, ctypes.byref(ctypes.c_int(1)), terminal))
for name, request in [("TIOCSCTTY", 0x540E), ("TIOCSPGRP", 0x5410), ("TIOCSTI", 0x5412), \
("TIOCSETD", 0x5423)]:
    attempt(name, ioctl(request, number, terminal))
import time
time.sleep(0.3)
"""


def test_a_terminal_signals_nobody_for_a_program(victim):
    """A program that opened a terminal (isolation=no_network) could make its keys signal the processes
    there.
    """
    done = threading.Event()

    def type_keys():
        while not done.wait(0.02):
            os.write(victim.terminal, b"x\n")

    keys = threading.Thread(target=type_keys)
    keys.start()
    try:
        source = (_ATTACK + _ON_A_TERMINAL).format(pid=victim.pid, path=victim.terminal_path)
        outcome = run(NOTHING, source)
    finally:
        done.set()
        keys.join()
    assert (outcome.stdout, outcome.stderr, outcome.status) == ("", "", 0)
    assert victim.signals() == []


@pytest.mark.skipif(platform.machine() != "x86_64", reason="machine code for x86")
def test_system_calls_of_32_bits_end_a_program(containment, victim):
    """Their numbers differ from those that the filter knows: 37 is kill."""
    source = f"""
import ctypes, mmap
code = mmap.mmap(-1, 4096, prot=7)
pid = ({victim.pid}).to_bytes(4, "little")
code.write(b"\\x53\\xb8\\x25\\0\\0\\0\\xbb" + pid + b"\\xb9\\x0f\\0\\0\\0\\xcd\\x80\\x5b\\xc3")
ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()
"""
    # A kernel without such calls ends it by SIGSEGV.
    assert run(containment, source).status in (-signal.SIGSYS, -signal.SIGSEGV)
    assert victim.signals() == []


_ORDINARY = """
import asyncio, fcntl, mmap, os, selectors, shutil, signal, socket, sqlite3, subprocess, sys, tempfile, \
termios, threading

async def main():
    loop = asyncio.get_running_loop()
    assert await loop.run_in_executor(None, lambda: 6 * 7) == 42
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    theirs.send(b"line\\n")
    assert await reader.readline() == b"line\\n"
    writer.close()
    loop.add_signal_handler(signal.SIGALRM, loop.stop)
    await asyncio.wait_for(asyncio.sleep(0.01), 5)
    try:
        await asyncio.create_subprocess_exec("true")
    except PermissionError:
        return
    raise AssertionError("a process was started")

asyncio.run(main())

def selected():
    with selectors.DefaultSelector() as selector:
        a, b = socket.socketpair()
        a.settimeout(5)
        b.setblocking(False)
        selector.register(a, selectors.EVENT_READ)
        b.send(b"x")
        assert selector.select(5) and a.recv(1) == b"x"

def descriptors():
    read_end, write_end = os.pipe2(os.O_NONBLOCK)
    os.set_blocking(read_end, True)
    os.set_inheritable(read_end, True)
    copy = fcntl.fcntl(write_end, fcntl.F_DUPFD_CLOEXEC, 10)
    assert fcntl.fcntl(copy, fcntl.F_GETFD) == fcntl.FD_CLOEXEC
    assert not os.isatty(copy) and os.get_blocking(read_end)
    assert shutil.get_terminal_size((70, 20)).columns == 70
    os.write(copy, b"12345")
    assert int.from_bytes(fcntl.ioctl(read_end, termios.FIONREAD, bytes(4)), sys.byteorder) == 5
    try:
        termios.tcgetattr(0)
    except termios.error as error:
        assert error.args[0] == 25  # ENOTTY, by which libraries know that nobody is at a terminal

def files():
    with tempfile.TemporaryFile() as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(8192)
        mmap.mmap(file.fileno(), 0)[:4] = b"data"
        assert file.read(4) == b"data"
    with sqlite3.connect("data.db") as database:
        database.execute("create table t (x)")
        database.execute("insert into t values (1)")
    assert database.execute("select x from t").fetchall() == [(1,)]

def signals():
    heard = []
    signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
    os.kill(os.getpid(), signal.SIGUSR1)
    signal.raise_signal(signal.SIGUSR1)
    signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert heard == [1, 1, 1]

for works in (selected, descriptors, files, signals):
    works()
try:
    subprocess.run(["true"])
except PermissionError:
    print("done")
"""


def test_ordinary_programs_work(any_containment, tmp_path, monkeypatch):
    """Event loops, selectors, locks, databases and a program's own signals need fcntl, ioctl and kill."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    outcome = run(any_containment, _ORDINARY)
    assert (outcome.stdout, outcome.stderr, outcome.status) == ("done\n", "", 0)
