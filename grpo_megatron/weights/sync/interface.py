"""What a weight sync needs of the two sides, and of the way between them."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import ray


class WeightSource(Protocol):
    """The trainer. Implemented by trainer.policy.PolicyTrainer."""

    def weight_stream(self, max_bytes: int) -> AbstractContextManager[Iterator[ray.ObjectRef]]:
        """Within this context: references to all weights in weights.buckets.Bucket of at most `max_bytes`, in HF names.

        All must be taken, because making them is collective over the trainer's ranks.
        """


class WeightTarget(Protocol):
    """The engines. Implemented by sglang.pool.EnginePool.

    Between `begin_update` and `end_update` the engines serve no request; if anything fails in between, their weights are
    undefined and the run must end.
    """

    def begin_update(self) -> None: ...

    def load_bucket(self, bucket: ray.ObjectRef) -> list[str]:
        """Load a weights.buckets.Bucket; returns the HF names of what every engine has loaded."""

    def end_update(self, version: int) -> None:
        """What is sampled from now on carries `version`."""


class Transport(Protocol):
    """One way for the weights to travel; called within an update session of the target."""

    def transfer(self, source: WeightSource, target: WeightTarget) -> list[str]:
        """Returns the HF names of the tensors that arrived."""
