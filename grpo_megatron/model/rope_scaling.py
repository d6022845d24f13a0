"""Scalings of the rotary embedding's frequencies, with which models support a longer context."""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LinearScaling:
    """Division of all the rotary embedding's frequencies by `factor`, for a longer context."""

    factor: float

    def scaled(self, frequencies: torch.Tensor, theta: float) -> torch.Tensor:
        """Return the frequencies after scaling. See Yarn.scaled."""
        return frequencies / self.factor


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of the rotary embedding's frequencies as in Llama 3.1, for a longer context.

    n = original_max_positions is the context length before scaling, in tokens. Wavelengths above
    n / low_freq_factor are stretched by `factor`. Wavelengths below n / high_freq_factor are kept. Between
    the two limits, frequencies are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def scaled(self, frequencies: torch.Tensor, theta: float) -> torch.Tensor:
        """Return the frequencies after scaling. See Yarn.scaled."""
        wavelength = 2 * math.pi / frequencies
        share = (self.original_max_positions / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        share = share.clamp(0.0, 1.0)
        return (1 - share) * frequencies / self.factor + share * frequencies


@dataclass(frozen=True)
class Yarn:
    """YaRN's scaling of the rotary embedding's frequencies (arXiv:2309.00071), for a longer context.

    A frequency that makes more than `beta_fast` turns within the original context length is kept. A frequency
    that makes fewer than `beta_slow` turns is divided by `factor`. Frequencies between the two are
    interpolated. The cosines and sines are multiplied by one extra factor. In models with latent attention,
    the attention scores are multiplied by another.
    """

    factor: float
    """Divisor of the low frequencies."""
    beta_fast: float
    """Number of turns above which a frequency is kept."""
    beta_slow: float
    """Number of turns below which a frequency is divided by `factor`."""
    original_max_positions: int
    """Context length before scaling, in positions."""
    mscale: float | None = None
    """Weight of the logarithm of `factor` in the factor of cosines and sines; None: 1."""
    mscale_all_dim: float | None = None
    """Weight of this logarithm in the factor of the attention scores, by whose root cosines and sines are
    divided; None: there is no such factor."""
    attention_factor: float | None = None
    """Factor of cosines and sines that config.json sets itself; None: derived from the other numbers."""
    truncate: bool = True
    """True if the interpolation starts and ends at whole channels of a head."""

    def _grown(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    @property
    def derived_cos_factor(self) -> float:
        """Factor by which the cosines and sines are multiplied if attention_factor is not set."""
        if self.mscale is None or self.mscale_all_dim is None:
            return self._grown(1.0)
        return self._grown(self.mscale) / self._grown(self.mscale_all_dim)

    @property
    def score_factor(self) -> float:
        """Factor by which latent attention's scores are multiplied."""
        return 1.0 if self.mscale_all_dim is None else self._grown(self.mscale_all_dim) ** 2

    def scaled(self, frequencies: torch.Tensor, theta: float) -> torch.Tensor:
        """Return the rotary embedding's frequencies after scaling, float32 [d / 2].

        frequencies: frequencies before scaling, in radians per position, float32 [d / 2], for the d rotated
            channels of a head.
        theta: base of the rotary embedding.
        """
        d = 2 * len(frequencies)

        def channel(turns: float) -> float:
            return d * math.log(self.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = channel(self.beta_fast), channel(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, d - 1)
        ramp = (torch.arange(d // 2, dtype=torch.float32) - low) / (high - low or 0.001)
        ramp = ramp.clamp(0.0, 1.0)
        return ramp * frequencies / self.factor + (1 - ramp) * frequencies


# Scaling of the rotary embedding. None: there is none.
Scaling = LinearScaling | RopeScaling | Yarn | None
