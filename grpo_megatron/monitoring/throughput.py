"""Throughput of a run, and how long trainer and engines wait for each other."""

from dataclasses import dataclass

import numpy as np

from grpo_megatron.batch.schedule import CostModel
from grpo_megatron.monitoring.samples import TrainedOn

# Phases of the driver in which engines work, and in which ranks work. In all other phases neither work, or
# both wait for the driver.
_OF_ENGINES = ("generate", "evaluate", "sync", "probe", "release", "resume_weights", "resume_kv_cache")
# In `score` the ranks run a reward model. Other kinds of rewards are computed during `generate`.
_OF_TRAINER = ("score", "logprobs", "train", "reference", "sync", "probe", "wake", "sleep")
# A forward and a backward pass together. The backward pass costs as much as two forward passes.
_FORWARD_PASSES = 3


@dataclass(frozen=True)
class Throughput:
    """Computes tokens/s, FLOPs utilisation, and idle shares of trainer and engines, for each step."""

    cost: CostModel
    """Estimates the FLOPs of a forward pass from sequence lengths."""
    ranks: int
    """Number of trainer ranks."""
    engine_devices: int
    """Number of devices of all engines."""
    shared: bool = False
    """True if engines and ranks are on the same devices."""
    peak: float | None = None
    """Peak FLOP/s of a device in dense bf16; None if not known."""

    @property
    def devices(self) -> int:
        """Number of devices that the run uses. On CPUs, each rank of trainer and engines is a device."""
        return max(self.ranks, self.engine_devices) if self.shared else self.ranks + self.engine_devices

    def scalars(self, trained_on: TrainedOn, seconds: float, phases: dict[str, float]) -> dict[str, float]:
        """Return {name: value} of the metrics `throughput/...` and `idle/...` of a step.

        The FLOPs utilisation (`throughput/mfu_...`) is missing if the device's peak FLOP/s is not known, or
        if `phases` has no "train".

        trained_on: the sequences that the step trained on.
        seconds: duration of the step.
        phases: {phase of the driver: seconds} within the step.
        """
        tokens = int(trained_on.lengths.sum())
        found = {
            "throughput/tokens_per_second": tokens / seconds,
            "throughput/tokens_per_second_per_device": tokens / seconds / self.devices,
        }
        if self.peak and phases.get("train"):
            flops = _FORWARD_PASSES * trained_on.epochs * float(np.sum(self.cost.flops(trained_on.lengths)))
            found["throughput/mfu_train"] = flops / (phases["train"] * self.ranks * self.peak)
            found["throughput/mfu_step"] = flops / (seconds * self.devices * self.peak)
        roles = {"trainer": _OF_TRAINER} | ({"engines": _OF_ENGINES} if self.engine_devices else {})
        for role, own in roles.items():
            found[f"idle/{role}"] = 1 - sum(phases.get(name, 0.0) for name in own) / seconds
        return found
