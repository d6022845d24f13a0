"""Child: a contained process that runs one sandboxed program, as the helper's watcher process sees it."""

import contextlib
import fcntl
import os
import socket
import sys
import time
import traceback

from grpo_megatron.sandbox import harness, relay
from grpo_megatron.sandbox.contain import contain
from grpo_megatron.sandbox.system_calls import adopt_orphans

_READ_AT_ONCE = 1 << 16


class Child:
    """A contained process that runs one sandboxed program or its tests, as seen by its parent process.

    The constructor forks the process. It raises OSError if the process cannot be contained. In that case,
    nothing of the program has run.

    program: the message from Sandbox.run that describes the program, a dict.
    channel: file descriptor through which the program's results leave the process, or None. In the process,
        it has the number harness.CHANNEL.
    written: {name of an output, such as "stdout": bytes that the process has written to it so far}
    open: {descriptor of an output pipe that is not at its end yet: name of the output}
    status: exit status of the process, or -N if signal N ended it; None until `reap` is called
    cpu_seconds: processor time that the process used; 0.0 until `reap` is called
    """

    def __init__(self, program: dict, channel: int | None):
        self.written = {"stdout": b"", "stderr": b""}
        self.open: dict[int, str] = {}
        self.status: int | None = None
        self.cpu_seconds = 0.0
        self._may_fork = program["processes"] > 1
        self._is_command = program["kind"] == "command"
        # Only the end of a command's output matters.
        self._kept = program["limits"]["output_kib"] << 10 if self._is_command else None
        if self._may_fork:
            adopt_orphans()
        ours, theirs = socket.socketpair()
        ends = {name: os.pipe() for name in self.written}
        problem, problem_end = os.pipe()
        stdin = _file_of(program["stdin"])
        self.pid = os.fork()
        if not self.pid:
            descriptors = [stdin, ends["stdout"][1], ends["stderr"][1], channel]
            _become(program, descriptors, problem_end, theirs.fileno())
        self.pidfd = os.pidfd_open(self.pid)
        theirs.close()
        for name, (end, other) in ends.items():
            self.open[end] = name
            os.close(other)
        os.close(problem_end)
        os.close(stdin)
        text = _read_all(problem)
        if text:
            self.end()
            raise OSError(text.decode())
        with ours:
            _, listeners, _, _ = socket.recv_fds(ours, 1, 1)
        for listener in listeners:
            relay.serve(socket.socket(fileno=listener), program["port"])

    def read(self, descriptor: int) -> None:
        """Read once from an output pipe of the process, and append the bytes to `written`.

        If the pipe is at its end, close the descriptor instead.

        descriptor: descriptor of a pipe in `open` that is ready to be read.
        """
        data = os.read(descriptor, _READ_AT_ONCE)
        if data:
            name = self.open[descriptor]
            self.written[name] += data
            if self._kept is not None:
                self.written[name] = self.written[name][-self._kept :]
        else:
            del self.open[descriptor]
            os.close(descriptor)

    def also_read(self, descriptor: int, name: str) -> None:
        """Read a further pipe of the process, and keep its content in written[name]."""
        self.written[name] = b""
        self.open[descriptor] = name

    def reap(self) -> None:
        """Collect the exit status of the ended process, and kill all processes that it has started.

        Sets `status` and `cpu_seconds`.
        """
        if self._may_fork:
            # The id of the process group is not reused before the reaping.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, 9)
        _, status, usage = os.wait4(self.pid, 0)
        self.status = os.waitstatus_to_exitcode(status)
        self.cpu_seconds = usage.ru_utime + usage.ru_stime
        os.close(self.pidfd)
        if self._is_command:
            _end_descendants()
        while self._may_fork:
            try:
                os.waitpid(-self.pid, 0)
            except ChildProcessError:
                break

    def end(self) -> None:
        """Kill the process if it is still alive, and read the rest of its output into `written`."""
        if self.status is None:
            os.kill(self.pid, 9)
            self.reap()
        # The processes that it has started have ended as well, so nothing holds the other ends of the pipes
        # open.
        while self.open:
            self.read(next(iter(self.open)))

    def seconds_without_processor(self) -> float:
        """Return for how many seconds the process has waited for a free processor.

        This time does not count towards the program's time limit, because other work on the machine causes
        it. Only the process's first thread is measured. The result is 0 if the kernel does not measure the
        time.
        """
        try:
            with open(f"/proc/{self.pid}/schedstat", encoding="ascii") as file:
                return int(file.read().split()[1]) / 1e9
        except (OSError, IndexError):
            return 0.0

    def num_threads(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/task"))

    def has_more_processes_than(self, most: int) -> bool:
        """Return True if the program has more than `most` processes, including its first process.

        The search ends as soon as there is one process too many, because a fork bomb starts processes faster
        than they can all be found.
        """
        if not self._may_fork:
            return most < 1
        for orphan in set(_children(os.getpid())) - {self.pid}:
            os.waitpid(orphan, os.WNOHANG)
        found = _children(os.getpid())  # the program's first process, and orphans of it
        for pid in found:  # the list grows meanwhile
            if len(found) > most:
                break
            found += _children(pid)
        return len(found) > most


def _end_descendants() -> None:
    """Kill and reap all descendants of this process, also those that have left its process groups.

    The process must have called `adopt_orphans` before they were started.
    """
    while found := _children(os.getpid()):
        for pid in found:  # the list grows meanwhile
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
            found += _children(pid)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.002)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):  # the process may have ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                found += map(int, file.read().split())
    return found


def _file_of(text: str) -> int:
    """Return the descriptor of a file in memory that contains this text, for use as a program's stdin.

    Unlike a pipe, such a file needs no process that writes to it while the program reads.
    """
    descriptor = os.memfd_create("stdin")
    data = memoryview(text.encode("utf-8", "replace"))
    while data:
        data = data[os.write(descriptor, data) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _read_all(descriptor: int) -> bytes:
    found = b""
    while data := os.read(descriptor, _READ_AT_ONCE):
        found += data
    os.close(descriptor)
    return found


def _become(program: dict, descriptors: list[int | None], problem_pipe: int, handover: int) -> None:
    """Turn this newly forked process into the program: contain the process, run the program, and exit.

    The process ends by SystemExit, so that the Python interpreter shuts down as usual.

    program: the message from Sandbox.run that describes the program.
    descriptors: the file descriptors that get the numbers 0, 1, 2 and harness.CHANNEL, in this order. If one
        is None, its number stays closed.
    problem_pipe: descriptor to which an error message is written if the process cannot be contained.
    handover: socket to the parent process, which gets what `contain` returns.
    """
    try:
        # Move all descriptors to high numbers first, so that none is overwritten before it is moved.
        problem_pipe, handover = _moved_up(problem_pipe), _moved_up(handover)
        kept = [None if descriptor is None else _moved_up(descriptor) for descriptor in descriptors]
        os.closerange(0, _HIGH)
        for target, descriptor in enumerate(kept):
            if descriptor is not None:
                os.dup2(descriptor, target)
        for descriptor in kept:
            if descriptor is not None:
                os.close(descriptor)
        listener = contain(program)
        with socket.socket(fileno=handover) as parent:
            if listener:
                socket.send_fds(parent, [b"."], [listener.fileno()])
                listener.close()
        _write_files(program["files"])
        harness.attach_standard_streams()
        harness.forget_helper()
    except BaseException as error:
        os.write(problem_pipe, str(error).encode()[:2000] or b"failed")
        os._exit(1)
    os.close(problem_pipe)
    try:
        _perform(program)
    except Exception:
        # The helper's code is further up the stack. It must not handle this error in the child process.
        traceback.print_exc()
        sys.exit(1)
    sys.exit(0)


def _perform(program: dict) -> None:
    source = program["source"]
    if program["kind"] == "script":
        harness.run(source)
    elif program["kind"] == "command":
        harness.execute(source, program["environment"], program["links"])
    elif program["kind"] == "call":
        harness.call(source, program["function"], program["arguments"])
    elif program["kind"] == "served":
        harness.Server(source, program["function"]).serve()
    else:
        harness.test(source, program["function"])


_HIGH = 512  # larger than all descriptors that the helper uses


def _moved_up(descriptor: int) -> int:
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD, _HIGH)


def _write_files(files: dict[str, str]) -> None:
    for name, text in files.items():
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        with open(name, "x", encoding="utf-8") as file:
            file.write(text)
