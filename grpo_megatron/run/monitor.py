"""TensorBoard scalars, and the live line per step on the terminal."""

import json
import sys
import time

from grpo_megatron.run.folder import METRICS
from grpo_megatron.run.phases import Phases


def say(text: str) -> None:
    """A line for people."""
    print(text, flush=True, file=sys.stdout)


class Monitor:
    """Collects what a run measures. Scalars also go to metrics.jsonl, one line per step."""

    def __init__(self, directory: str, total_steps: int, resumed: int = 0):
        """resumed: the step a resumed run continues after; later points of the curves are taken back."""
        from torch.utils.tensorboard import SummaryWriter

        self.directory = directory
        self.tensorboard_dir = f"{directory}/tensorboard"
        self._writer = SummaryWriter(self.tensorboard_dir, purge_step=resumed + 1)
        self._jsonl = open(f"{directory}/{METRICS}", "a", encoding="utf-8")  # noqa: SIM115 - held for the run
        self._total_steps = total_steps
        self.phases = Phases()
        self._step_start = time.perf_counter()

    def start_step(self) -> None:
        self.phases.take()
        self._step_start = time.perf_counter()

    def finish_step(self, step: int, scalars: dict[str, float], tokens: int) -> dict[str, float]:
        """Add times and throughput to a step's scalars, log them; returns all of them.

        tokens: prompt and response tokens the step trained on.
        """
        seconds = time.perf_counter() - self._step_start
        phases = self.phases.take()
        scalars = dict(scalars)
        scalars.update({f"time/{name}": value for name, value in phases.items()})
        scalars["time/step"] = seconds
        scalars["time/other"] = seconds - sum(phases.values())
        scalars["throughput/tokens_per_second"] = tokens / seconds
        self.log(step, scalars)
        return scalars

    def log(self, step: int, scalars: dict[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._jsonl.write(json.dumps({"step": step, **scalars}) + "\n")
        self._jsonl.flush()

    def text(self, step: int, name: str, text: str) -> None:
        self._writer.add_text(name, text, step)

    def line(self, step: int, scalars: dict[str, float], shown: dict[str, str]) -> None:
        """One line: progress, the scalars in `shown` (name -> label), tokens/s, time per phase."""
        parts = [f"step {step:>4}/{self._total_steps}"]
        parts += [f"{label} {scalars[name]:.4g}" for name, label in shown.items() if name in scalars]
        parts.append(f"{scalars['throughput/tokens_per_second']:.0f} tok/s")
        phases = [
            (n.removeprefix("time/"), v)
            for n, v in scalars.items()
            if n.startswith("time/") and n not in ("time/step", "time/other")
        ]
        parts.append(f"{scalars['time/step']:.2f} s (" + " ".join(f"{name} {value:.2f}" for name, value in phases) + ")")
        self.say(" | ".join(parts))

    def evaluated(self, step: int, scalars: dict[str, float]) -> None:
        """Log the results of an evaluation after `step` steps, and show them."""
        self.log(step, scalars)
        results = ", ".join(f"{name.removeprefix('eval/')} {value:.3f}" for name, value in scalars.items())
        self.say(f"evaluation after {step} steps: {results}")

    def say(self, text: str) -> None:
        say(text)

    def close(self) -> None:
        self._writer.close()
        self._jsonl.close()
