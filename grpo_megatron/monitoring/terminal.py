"""Terminal output: a line for each step and, on a terminal, a progress bar with the time left."""

import logging
import time
from contextlib import suppress

from tqdm import tqdm

logger = logging.getLogger(__name__)

# Scalars that the line of a step shows if the step has them, and their labels.
SHOWN = {
    "reward/mean": "reward",
    "sft/loss_per_token": "loss",
    "reward_model/loss": "loss",
    "reward_model/accuracy": "accuracy",
    "reward_model/margin": "margin",
    "actor/kl_to_reference": "kl",
    "actor/entropy": "entropy",
    "actor/grad_norm": "grad norm",
    "mismatch/max": "mismatch",
}
# Scalars under `time/` that are not phases.
_NO_PHASES = ("time/step", "time/other", "time/monitor")


class Terminal:
    """Output about a run's steps: lines on stdout, and a progress bar on stderr if stderr is a terminal."""

    def __init__(self, total_steps: int, resumed: int):
        """Prepare the output. Nothing is shown before the first step.

        total_steps: number of steps that the run makes.
        resumed: step of the checkpoint that the run continues from; 0 for a new run.
        """
        self._total, self._first = total_steps, resumed
        self._bar: tqdm | None = None
        self._started = self._done = 0.0

    def start_step(self) -> None:
        """Start the progress bar, and the clock from which `eta` is computed. Later calls do nothing."""
        if not self._started:
            self._started = time.monotonic()
            with suppress(OSError):
                # smoothing=0 takes the mean over the whole run, like `eta`.
                self._bar = tqdm(
                    total=self._total,
                    initial=self._first,
                    desc="steps",
                    unit="step",
                    smoothing=0,
                    disable=None,
                    dynamic_ncols=True,
                )

    def finish_step(self, step: int) -> None:
        self._done = step
        if self._bar is not None:
            with suppress(OSError):
                self._bar.update(step - self._bar.n)

    @property
    def eta(self) -> float | None:
        """Estimated seconds until the last step is done; None until this process has finished a step.

        The estimate includes the time between steps, for example evaluations.
        """
        if self._done <= self._first:
            return None
        return (time.monotonic() - self._started) / (self._done - self._first) * (self._total - self._done)

    def phase(self, name: str) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(name, refresh=False)

    def line(self, step: int, scalars: dict[str, float]) -> None:
        """Print a line about a step: its index, some scalars, tokens/s, seconds of each phase, and time left.

        scalars: {name: value} of the step, as Monitor.finish_step returns it. The scalars named in SHOWN are
            shown.
        """
        parts = [f"step {step:>4}/{self._total}"]
        parts += [f"{label} {scalars[name]:.4g}" for name, label in SHOWN.items() if name in scalars]
        parts += ["STEP DROPPED"] if scalars.get("actor/dropped_steps") else []
        parts.append(f"{scalars['throughput/tokens_per_second']:.0f} tok/s")
        phases = [
            (n.removeprefix("time/"), v)
            for n, v in scalars.items()
            if n.startswith("time/") and n not in _NO_PHASES and v >= 0.005
        ]
        parts.append(
            f"{scalars['time/step']:.2f} s ("
            + " ".join(f"{name} {value:.2f}" for name, value in phases)
            + ")"
        )
        if self.eta is not None:
            parts.append(f"ETA {tqdm.format_interval(self.eta)}")
        logger.info(" | ".join(parts))

    def close(self) -> None:
        if self._bar is not None:
            with suppress(OSError):
                self._bar.close()
