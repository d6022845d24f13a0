"""The helper process of a Sandbox. It forks, watches and ends contained programs.

The helper has one thread and few modules, and is not contained itself. For each program it forks a watcher
process. The watcher forks the program, and ends after the program. So no program is forked from a process
that has read the program's tests or the outcomes of earlier programs, and the memory of a program never
contains them.
"""

import json
import os
import select
import signal
import site
import socket
import sys
import time

from grpo_megatron.sandbox.child import Child
from grpo_megatron.sandbox.contain import BARE, NAMESPACES
from grpo_megatron.sandbox.system_calls import end_with_parent

# Intervals of checking the limits that the kernel does not enforce. Hundreds of commands may run at once.
_LOOK_SECONDS, _LOOK_SECONDS_OF_COMMANDS = 0.03, 0.5


def main(package_folder: str, packages: list[str]) -> None:
    """Run the helper process: read programs from stdin, run them, and write their outcomes to stdout.

    The helper ends when stdin ends. Each program and each outcome is a message: 8 bytes with its length
    (big-endian), followed by JSON.

    package_folder: the folder on Python's path that contains this project. Programs must not import from it.
    packages: folders with the packages that programs may import.
    """
    # The parent process may have blocked or ignored signals, and both are inherited.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for signum in (signal.SIGCHLD, signal.SIGXCPU):
        signal.signal(signum, signal.SIG_DFL)
    site.setquit()  # defines exit and quit, which are missing because Python was started with -S
    sys.path[:] = [path for path in sys.path if path != package_folder] + packages
    while (program := _receive()) is not None:
        watcher = os.fork()
        if not watcher:
            end_with_parent()
            _send(_run(program))
            os._exit(0)
        if os.waitpid(watcher, 0)[1]:
            sys.exit(1)  # the watcher has printed the reason


def _receive() -> dict | None:
    head = _read_exactly(8)
    return json.loads(_read_exactly(int.from_bytes(head))) if head else None


def _read_exactly(count: int) -> bytes:
    """Read and return exactly `count` bytes from stdin. Return b"" if stdin ends before.

    No further bytes may be read, because the next message on stdin may be for a forked process.
    """
    found = b""
    while len(found) < count:
        data = os.read(0, count - len(found))
        if not data:
            return b""
        found += data
    return found


def _send(message: dict) -> None:
    data = json.dumps(message).encode()
    data = memoryview(len(data).to_bytes(8) + data)
    while data:
        data = data[os.write(1, data) :]


def _run(program: dict) -> dict:
    """Run one program, and return its outcome, as the message that Sandbox.run receives.

    If the program has tests, they are read from stdin after the program has started.

    program: the message from Sandbox.run that describes the program.

    Returns a dict with the keys ended, status, seconds, result, stdout and stderr, from which Sandbox.run
    makes an Outcome. If the program cannot be contained, returns {"problem": text}.
    """
    start = time.monotonic()
    children: list[Child] = []
    try:
        _start(program, children)
        ended = _watch(children, program, start)
    except OSError as error:
        _end(children)
        return {"problem": str(error)}
    _end(children)
    return _outcome(children, ended, program["limits"], time.monotonic() - start)


def _start(program: dict, children: list[Child]) -> None:
    """Start the process of a program, and if there are tests, also the process of the tests.

    After the start of a program with tests, this function sends an empty message, to which Sandbox.run
    answers with the tests. If stdin ends instead, the children and this process are ended.

    program: the message from Sandbox.run that describes the program.
    children: an empty list, to which the processes are added. `children[0]` is the process of the tests, or
        of the program if there are no tests. The run is over when `children[0]` ends.
    """
    if program["kind"] == "served":
        ours, channel = socket.socketpair()
        children.append(Child(program, channel.fileno()))
        channel.close()
        _send({})
        tests = _receive()
        if tests is None:
            _end_with_sandbox(children, program["folder"])
        children.insert(0, Child(tests, ours.fileno()))
        ours.close()
    elif program["kind"] == "call":
        result, channel = os.pipe()
        children.append(Child(program, channel))
        os.close(channel)
        children[0].also_read(result, "result")
    else:
        children.append(Child(program, None))


def _watch(children: list[Child], program: dict, start: float) -> str | None:
    """Read the output of the children until `children[0]` ends or a child exceeds a limit.

    children: the processes of the program and its tests. `children[0]` is that of the tests, or of the
        program if there are no tests.
    program: the message from Sandbox.run that describes the program, with its limits.
    start: value of time.monotonic() at the start of the run.

    Returns the name of the exceeded limit, which is a value of sandbox.run.Ended, or None if `children[0]`
    has ended.
    """
    most_bytes = program["limits"]["output_kib"] << 10
    interval = _LOOK_SECONDS_OF_COMMANDS if program["kind"] == "command" else _LOOK_SECONDS
    look = start + interval
    while children[0].status is None:
        alive = [child for child in children if child.status is None]
        watched = {descriptor: child for child in children for descriptor in child.open}
        pidfds = {child.pidfd: child for child in alive}
        ready, _, _ = select.select([0, *watched, *pidfds], [], [], max(0.0, look - time.monotonic()))
        for descriptor in ready:
            if descriptor in watched:
                child = watched[descriptor]
                child.read(descriptor)
                if any(len(text) > most_bytes for text in child.written.values()):
                    return "output"
            elif descriptor in pidfds:
                pidfds[descriptor].reap()
            else:
                _end_with_sandbox(children, program["folder"])
        if time.monotonic() >= look:
            reason = next(filter(None, (_limit_reached(child, program, start) for child in children)), None)
            if reason:
                return reason
            look = time.monotonic() + interval
    return None


def _limit_reached(child: Child, program: dict, start: float) -> str | None:
    if child.status is not None:
        return None
    limits, passed = program["limits"], time.monotonic() - start
    if program["containment"] == BARE:
        return None
    if passed > program["within"] or passed - child.seconds_without_processor() > limits["seconds"]:
        return "time"
    if child.num_threads() > limits["threads"]:
        return "threads"
    if child.has_more_processes_than(program["processes"]):
        return "processes"
    # With namespaces the folder is a file system whose size is limited already.
    if program["containment"] != NAMESPACES:
        files, size = _content(program["folder"])
        if files > limits["files"] or size > limits["files_mib"] << 20:
            return "files"
    return None


def _content(folder: str) -> tuple[int, int]:
    """Return (count, bytes) of a folder: the number of files and folders in it, and the disk space they use.

    Files and folders at all levels are counted.
    """
    count, size = 0, 0
    for at, folders, files in os.walk(folder):
        for name in folders + files:
            count += 1
            try:
                size += os.lstat(os.path.join(at, name)).st_blocks * 512
            except OSError:
                continue
    return count, size


def _end_with_sandbox(children: list[Child], folder: str) -> None:
    """End all children and this process, and delete a program's folder: whoever uses the sandbox is gone.

    Called when stdin is at its end while a program runs.
    """
    _end(children)
    import shutil  # rarely needed, and every sandbox starts a helper

    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _end(children: list[Child]) -> None:
    for child in children:
        child.end()


def _outcome(children: list[Child], ended: str | None, limits: dict, seconds: float) -> dict:
    first = children[0]
    most = limits["output_kib"] << 10
    texts = {
        name: "".join(_text(child, name, most) for child in reversed(children))
        for name in ("stdout", "stderr")
    }
    if ended is None:
        ended = next(filter(None, (_kernel_limit(child, limits) for child in children)), "itself")
    result = _text(first, "result", most) if first.written.get("result") else None
    return {"ended": ended, "status": first.status, "seconds": seconds, "result": result, **texts}


def _text(child: Child, name: str, most: int) -> str:
    return child.written[name][:most].decode("utf-8", "replace")


def _kernel_limit(child: Child, limits: dict) -> str | None:
    """Return "cpu" or "memory" if this limit has ended the child, else None.

    The kernel enforces these two limits, so they are recognized only by the way in which the child ended.

    child: a process that runs a program or its tests.
    limits: the fields of config.sandbox.SandboxLimits as a dict.
    """
    # A program that ignores SIGXCPU gets SIGKILL a second later.
    if child.status == -signal.SIGXCPU or (child.status == -9 and child.cpu_seconds >= limits["cpu_seconds"]):
        return "cpu"
    lines = child.written["stderr"].rstrip().splitlines()
    return "memory" if child.status == 1 and lines and lines[-1].startswith(b"MemoryError") else None
