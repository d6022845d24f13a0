"""Result of a self-test, and the text that shows it."""

from dataclasses import dataclass, field


@dataclass
class Verdict:
    """Result of a self-test, which compares the log-probs that engine and trainer give to sampled tokens.

    delta is the difference between the two log-probs of a token.
    """

    mean: list[float] = field(default_factory=list)
    """Mean |delta| of each step."""
    maximum: list[float] = field(default_factory=list)
    """Largest |delta| of each step."""
    limit: float = float("nan")
    """Largest acceptable mean |delta| of a step, derived from the trainer's own rounding errors."""
    sampling_z: float = float("nan")
    """Mean surprise (-log p) of the samples minus the trainer's mean entropy, in standard errors.
    NaN if not measured: the log-probs differ for another reason than temperature or precision."""
    explanations: list[str] = field(default_factory=list)
    """One text for each cause that was found. It begins with the cause's name, such as `top-p`."""

    @property
    def passed(self) -> bool:
        return not self.explanations

    @property
    def beyond_limit(self) -> list[int]:
        """Indices, from 0, of the steps whose mean |delta| is NaN or above `limit`."""
        return [step for step, mean in enumerate(self.mean) if not mean <= self.limit]

    def text(self) -> str:
        lines = [f"{'step':>6} {'mean |delta|':>14} {'max |delta|':>14}"]
        lines += [
            f"{i + 1:>6} {m:>14.3g} {w:>14.3g}"
            for i, (m, w) in enumerate(zip(self.mean, self.maximum, strict=True))
        ]
        lines.append(f"limit of the mean |delta|, from the trainer's own rounding: {self.limit:.3g}")
        lines.append(
            f"mean -log p of the samples minus the trainer's entropy: {self.sampling_z:+.1f} standard errors"
        )
        return "\n".join(lines + (self.explanations or ["engine and trainer agree"]))
