"""A line for each step; on a terminal, a bar with the time that is left below them."""

import sys
import time
from contextlib import suppress

from tqdm import tqdm

# What is shown of a step, where it has it, and what it is called.
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
# What is not shown of `time/`, because it is no phase.
_NO_PHASES = ("time/step", "time/other", "time/monitor")


def say(text: str) -> None:
    """A line for people. Where nobody can have it, because the terminal is gone or the disk behind it full, the run goes on."""
    with suppress(OSError):
        # A bar steps aside for it and comes back below.
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()


class Rarely:
    """Says what comes again and again the first time, the 2nd, the 4th, the 8th and so on."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, text: str) -> None:
        self._count += 1
        if self._count & (self._count - 1) == 0:
            say(
                text
                if self._count == 1
                else f"{text} (the {self._count}th time; those between are not shown)"
            )


class Terminal:
    """Lines go to stdout. The bar is on stderr, only where that is a terminal."""

    def __init__(self, total_steps: int, resumed: int):
        """resumed: the step a resumed run continues after."""
        self._total, self._first = total_steps, resumed
        self._bar: tqdm | None = None
        self._started = self._done = 0.0

    def start_step(self) -> None:
        """The first call is the beginning, from which the time that is left is estimated."""
        if not self._started:
            self._started = time.monotonic()
            with suppress(OSError):
                # smoothing=0: the mean over the whole run, as `eta` has it.
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
        """Seconds until the last step is done, with what lies between steps as it was so far; None before the first is done."""
        if self._done <= self._first:
            return None
        return (time.monotonic() - self._started) / (self._done - self._first) * (self._total - self._done)

    def phase(self, name: str) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(name, refresh=False)

    def line(self, step: int, scalars: dict[str, float]) -> None:
        """Progress, the scalars of SHOWN, tokens/s, time per phase, time left."""
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
        say(" | ".join(parts))

    def close(self) -> None:
        if self._bar is not None:
            with suppress(OSError):
                self._bar.close()
