"""How fast a run is, and who waits for whom."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grpo_megatron.batch.schedule import CostModel
from grpo_megatron.batch.train_batch import TrainBatch

# Who works in a phase of the driver; in all others neither engines nor ranks do, or both wait for the driver.
_OF_ENGINES = ("generate", "evaluate", "sync", "probe", "release", "resume_weights", "resume_kv_cache")
# In `score` the ranks run a reward model; rewards of other kinds are given during `generate`.
_OF_TRAINER = ("score", "logprobs", "train", "reference", "sync", "probe", "wake", "sleep")
# A backward pass costs two forward passes.
_FORWARD_PASSES = 3


@dataclass(frozen=True)
class Throughput:
    """ranks, engine_devices: those of the trainer and of the engines. shared: they are the same devices.

    cost: FLOPs of a forward pass. peak: FLOP/s of a device in bf16, dense; None where that is not known.
    """

    cost: CostModel
    ranks: int
    engine_devices: int
    shared: bool = False
    peak: float | None = None

    @property
    def devices(self) -> int:
        """GPUs of the run; on machines without, ranks and engine ranks."""
        return max(self.ranks, self.engine_devices) if self.shared else self.ranks + self.engine_devices

    def scalars(
        self, batches: Sequence[TrainBatch], epochs: int, seconds: float, phases: dict[str, float]
    ) -> dict[str, float]:
        """Of a step that took `seconds`, of which `phases` has those of each phase; it trained `epochs` times on the batches."""
        tokens = sum(batch.num_tokens for batch in batches)
        found = {
            "throughput/tokens_per_second": tokens / seconds,
            "throughput/tokens_per_second_per_device": tokens / seconds / self.devices,
        }
        if self.peak and phases.get("train"):
            flops = (
                _FORWARD_PASSES
                * epochs
                * sum(float(np.sum(self.cost.flops(batch.lengths))) for batch in batches)
            )
            found["throughput/mfu_train"] = flops / (phases["train"] * self.ranks * self.peak)
            found["throughput/mfu_step"] = flops / (seconds * self.devices * self.peak)
        roles = {"trainer": _OF_TRAINER} | ({"engines": _OF_ENGINES} if self.engine_devices else {})
        for role, own in roles.items():
            found[f"idle/{role}"] = 1 - sum(phases.get(name, 0.0) for name in own) / seconds
        return found
