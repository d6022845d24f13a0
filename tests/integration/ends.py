"""A run that is started like a user's, and whose processes tests find, kill and look for afterwards."""

import contextlib
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil

from tests.tools import default_signals

_MARK = "GRPO_MEGATRON_TEST_RUN"
# What other processes than the keeper and the driver are called.
_TITLES = {
    "rank": "ray::_Worker",
    "engine": "ray::SGLangEngine",
    "scheduler": "sglang::scheduler",
    "reward worker": "ray::PoolWorker",
    "raylet": "/raylet/raylet",
    "gcs": "/gcs/gcs_server",
}
ROLES = ("driver", *_TITLES)


def arguments(arithmetic, root, *changes) -> list[str]:
    """Return the arguments of a run that goes on until it is stopped."""
    return [
        f"run.root={root}",
        "run.total_steps=100000",
        f"model.path={arithmetic}/model",
        f"data.train={arithmetic}/data/train.jsonl",
        "data.max_prompt_length=16",
        "data.train_batch_size=4",
        "rollout.n=2",
        "train.ppo_mini_batch_size=4",
        "rollout.max_response_length=12",
        "rollout.engine.dtype=float32",
        "rollout.engine.max_total_tokens=8192",
        "reward.function=tests.integration.helpers:digits",
        "reward.workers=1",
        "train.max_tokens_per_micro_batch=128",
        "megatron.precision=fp32",
        *changes,
    ]


class LiveRun:
    """`grpo-megatron COMMAND ...` in a process of its own.

    At the end of the context none of its processes is left.
    """

    def __init__(
        self, command: str, arguments: list[str], folder: Path, environment: dict[str, str] | None = None
    ):
        """Start the run.

        folder: folder for its output.
        environment: environment variables; None: those of this process.
        """
        self._mark = uuid.uuid4().hex
        self._out, self._err = folder / f"{self._mark}.out", folder / f"{self._mark}.err"
        with open(self._out, "wb") as out, open(self._err, "wb") as err:
            self.keeper = subprocess.Popen(
                [sys.executable, "-m", "grpo_megatron.cli", command, *arguments],
                stdout=out,
                stderr=err,
                env={**(os.environ if environment is None else environment), _MARK: self._mark},
                start_new_session=True,
                preexec_fn=default_signals,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        deadline = time.monotonic() + 30
        while (left := self.processes()) and time.monotonic() < deadline:
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self.keeper.poll()
            time.sleep(0.05)

    def processes(self) -> list[psutil.Process]:
        """Return all living processes that inherited this run's environment, whatever their parent is now."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(_MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def role(self, name: str) -> psutil.Process | None:
        """Return the process that has this role, or None."""
        with contextlib.suppress(psutil.Error):
            driver = next(iter(psutil.Process(self.keeper.pid).children()), None)
            if name == "driver" or driver is None:
                return driver
            return next(
                (process for process in self.processes() if _TITLES[name] in " ".join(process.cmdline())),
                None,
            )
        return None

    def wait_for(self, condition, seconds: float = 400.0):
        """Wait until condition() is true and return its value.

        Fail with the run's output if it ends or takes longer.
        """
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            assert self.keeper.poll() is None, f"the run has ended:\n{self.output()}{self.errors()}"
            assert time.monotonic() < deadline, f"not within {seconds} s:\n{self.output()}{self.errors()}"
            time.sleep(0.05)
        return value

    def steps(self) -> int:
        """Return the number of steps that the run has printed."""
        return self.output().count("\nstep ")

    def output(self) -> str:
        return self._out.read_text(encoding="utf-8", errors="replace")

    def errors(self) -> str:
        return self._err.read_text(encoding="utf-8", errors="replace")

    def ended(self, seconds: float = 120.0) -> int:
        """Wait for the end of the run and return its exit status, negative for the signal that killed its
        keeper.
        """
        return self.keeper.wait(seconds)

    def left_after(self, seconds: float) -> list[str]:
        """Return the run's processes that are still there after so many seconds."""
        deadline = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        names = []
        for process in left:
            with contextlib.suppress(psutil.Error):
                names.append(f"{process.pid} {' '.join(process.cmdline())[:120]}")
        return names
