"""What a weight sync needs of the two sides, and of the way between them."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import ray

from grpo_megatron.cluster.processes import Process
from grpo_megatron.weights.sync.order import Order


class WeightSource(Protocol):
    """The trainer. Implemented by trainer.policy.PolicyTrainer. processes: its ranks."""

    processes: list[Process]

    def sync_order(self, order: Order) -> list[ray.ObjectRef]:
        """Have every rank carry out its side of an order; a reference to each rank's order.Answer."""

    def weight_stream(self, max_bytes: int) -> AbstractContextManager[Iterator[ray.ObjectRef]]:
        """Within this context: references to all weights in weights.buckets.Bucket of at most `max_bytes`, in HF names.

        All must be taken, because making them is collective over the trainer's ranks.
        """


class WeightTarget(Protocol):
    """The engines. Implemented by sglang.pool.EnginePool. processes: one each.

    Between `begin_update` and `end_update` the engines serve no request; if anything fails in between, their weights are
    undefined, they never serve again, and the run must end.
    """

    processes: list[Process]

    def begin_update(self) -> None: ...

    def sync_order(self, order: Order) -> list[ray.ObjectRef]:
        """Have every engine carry out its side of an order; a reference to the order.Answers of each engine's ranks."""

    def load_bucket(self, bucket: ray.ObjectRef) -> list[str]:
        """Load a weights.buckets.Bucket; returns the HF names of what every engine has loaded."""

    def end_update(self, version: int) -> None:
        """What is sampled from now on carries `version`."""


class Transport(Protocol):
    """One way for the weights to travel; called within an update session of the target."""

    def transfer(self, source: WeightSource, target: WeightTarget, version: int) -> dict[str, float]:
        """Returns once every engine has all weights and their digests are right; what it took, by name.

        Raises RuntimeError, which names the tensor, for weights that are not what the trainer has.
        """

    def close(self) -> None: ...


class Probe(Protocol):
    """Compares what both sides compute. Implemented by trainer.weight_probe.WeightProbe."""

    def ask_trainer(self) -> None:
        """What the engines should answer; apart from `ask_engines`, because either side may have to leave the devices to the other."""

    def ask_engines(self) -> dict[str, float]:
        """What was found, by name. Raises RuntimeError if it is not what the trainer answered."""
