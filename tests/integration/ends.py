"""A run as a user starts it, whose processes are found, killed and looked for afterwards."""

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
    """Of a run that goes on for as long as it is let."""
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
    """`grpo-megatron COMMAND ...` in a process of its own; at the end of the context nothing of it is left."""

    def __init__(
        self, command: str, arguments: list[str], folder: Path, environment: dict[str, str] | None = None
    ):
        """folder: for what it prints. environment: this process's own where it is None."""
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
        """All that live and have inherited this run's environment, whoever is their parent now."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(_MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def role(self, name: str) -> psutil.Process | None:
        """The process that has this role, if there is one now."""
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
        """condition(), as soon as it is true. Fails with what the run printed if it ends before, or takes longer."""
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            assert self.keeper.poll() is None, f"the run has ended:\n{self.output()}{self.errors()}"
            assert time.monotonic() < deadline, f"not within {seconds} s:\n{self.output()}{self.errors()}"
            time.sleep(0.05)
        return value

    def steps(self) -> int:
        """How many it has shown."""
        return self.output().count("\nstep ")

    def output(self) -> str:
        return self._out.read_text(encoding="utf-8", errors="replace")

    def errors(self) -> str:
        return self._err.read_text(encoding="utf-8", errors="replace")

    def ended(self, seconds: float = 120.0) -> int:
        """The exit status, when the run has ended; negative for the signal that killed its keeper."""
        return self.keeper.wait(seconds)

    def left_after(self, seconds: float) -> list[str]:
        """What of the run is still there then."""
        deadline = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        names = []
        for process in left:
            with contextlib.suppress(psutil.Error):
                names.append(f"{process.pid} {' '.join(process.cmdline())[:120]}")
        return names
