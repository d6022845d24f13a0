"""A keeper and its driver around a command that only starts processes and waits."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.tools import default_signals

NOTHING_YET = "the run has no checkpoint yet, so the same command starts it from the beginning"

# The driver runs this command. It starts a process that no parent watches, in a session of its own, and a
# child of that process.
PROGRAM = """
import json, os, socket, subprocess, sys, time
from pathlib import Path
from grpo_megatron.commands.driver import drive
from grpo_megatron.commands.keeper import keep
from grpo_megatron.errors import Stopped, UserError

folder, what = Path(sys.argv[1]), sys.argv[2]

class Saver:
    folder = folder / "checkpoints"
    def save(self, step, state): (self.folder / f"step_{step:08d}").mkdir(parents=True)
    def finish(self): pass

from grpo_megatron.monitoring.status import StatusFile
from grpo_megatron.run import stop
def stale(folder): raise OSError(116, "Stale file handle", folder)
if "disk is stale" in what: stop.newest_folder = stale

def command(guard):
    if what == "refuse": raise UserError("planted refusal")
    if what == "fail": {}["planted defect"]
    guard.entered(str(folder), 60.0 if what == "slow steps" else 3.0, 600.0)
    guard.status = StatusFile(str(folder), "mine", 40).__enter__()
    daemon = subprocess.Popen(["sh", "-c", "sleep 1000 & wait"], start_new_session=True)
    orphan = subprocess.run(["sh", "-c", "sleep 1000 > /dev/null & echo $!"], stdout=subprocess.PIPE, \
text=True).stdout
    import psutil
    server = socket.create_server(("127.0.0.1", 0))
    if what.startswith("needs it"): guard.needs(lambda: [psutil.Process(daemon.pid)], server.getsockname()[1])
    if what == "needs later": \
guard.needs(lambda: [psutil.Process(daemon.pid)] if (folder / "up").exists() else [])
    if what == "needed no more": guard.needs(lambda: [psutil.Process(daemon.pid)]); guard.needs(None)
    while len(psutil.Process().children(recursive=True)) < 3: time.sleep(0.01)
    os.write(2, b"raw output of a library\\n")
    if "step" in what: guard.stop.step = 7
    (folder / "pids").write_text(json.dumps([os.getpid(), daemon.pid, int(orphan)]))
    (folder / "up").touch()
    if what == "needs its port": time.sleep(1); server.close()
    if what == "quit": os._exit(1)
    # As Ray's code does a moment after the guard has seen the end of Ray's daemons.
    if what == "needs it as a library does": guard._note_end = lambda *_: os._exit(1)
    if "defect" in what: guard._find = lambda: {}["planted"]
    if what == "done": return 0
    if what == "full":
        with open("/dev/full", "w") as file: file.write("x")
    if what == "fail later": raise RuntimeError("first line\\nsecond line")
    if "steps" in what:
        for step in range(7, 10**6):
            guard.stop.step = step
            time.sleep(7 if what == "slow steps" else 0.05)
            if guard.stop.is_made: guard.stop.leave(Saver(), lambda: {"step": step})
    while True: time.sleep(0.01)

sys.exit(keep(lambda connection: drive(command, connection)))
"""


class Kept:
    def __init__(self, folder: Path, what: str, **options):
        self.folder = folder
        self.keeper = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(folder), what],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "KEPT": str(folder)},
            **{"preexec_fn": default_signals} | options,
        )

    def up(self) -> "Kept":
        deadline = time.monotonic() + 120
        while not (self.folder / "up").exists():
            assert self.keeper.poll() is None, self.keeper.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return self

    @property
    def driver(self) -> int:
        return psutil.Process(self.keeper.pid).children()[0].pid

    def end(self) -> tuple[int, str]:
        """Return (exit status, stderr) when no process is left."""
        _, errors = self.keeper.communicate(timeout=60)
        deadline = time.monotonic() + 10
        while (left := self.living()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert left == []
        assert len(errors.splitlines()) <= 5
        return self.keeper.returncode, errors

    def living(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if (
                    process.environ().get("KEPT") == str(self.folder)
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process)
            except psutil.Error:
                continue
        return found


@contextmanager
def keepers(folder: Path) -> Iterator[Callable[..., Kept]]:
    """Yield a function that starts a keeper. At the end, all processes of these keepers are killed."""
    started = []

    def start(what: str, **options) -> Kept:
        started.append(Kept(folder, what, **options))
        return started[-1]

    yield start
    for run in started:
        for process in run.living():
            process.kill()
        run.keeper.wait()
