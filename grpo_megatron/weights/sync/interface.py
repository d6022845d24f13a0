"""Protocols of the parts of a weight sync: source, target, transport and probe."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import ray

from grpo_megatron.cluster.processes import Process
from grpo_megatron.weights.sync.order import Order


class WeightSource(Protocol):
    """The trainer, whose ranks are `processes`. Implemented by trainer.policy.PolicyTrainer."""

    processes: list[Process]

    def sync_order(self, order: Order) -> list[ray.ObjectRef]:
        """Make every rank carry out its side of an order. Return a reference to each rank's order.Answer."""

    def weight_stream(self, max_bytes: int) -> AbstractContextManager[Iterator[ray.ObjectRef]]:
        """Return a context that yields references to all weights, under HF names.

        Each reference is to a weights.buckets.Bucket of at most `max_bytes`. The caller must consume all of
        them, because building a bucket is a collective operation of the trainer's ranks.
        """


class WeightTarget(Protocol):
    """The engines, one process each. Implemented by sglang.pool.EnginePool.

    Between `begin_update` and `end_update` the engines serve no requests. If anything fails in between, their
    weights are undefined. Then they never serve again, and the run must end.
    """

    processes: list[Process]

    def begin_update(self) -> None: ...

    def sync_order(self, order: Order) -> list[ray.ObjectRef]:
        """Make every engine carry out its side of an order.

        Return one reference per engine, to the list of its ranks' order.Answer.
        """

    def load_bucket(self, bucket: ray.ObjectRef) -> list[str]:
        """Load a weights.buckets.Bucket into every engine. Return the HF names of its tensors."""

    def end_update(self, version: int) -> None:
        """Resume serving. Samples carry `version` from now on."""


class Transport(Protocol):
    """A method of transferring the weights. It is called within an update session of the target."""

    def transfer(self, source: WeightSource, target: WeightTarget, version: int) -> dict[str, float]:
        """Transfer all weights. Return {metric: value} once every engine has them and their digests match.

        Raises RuntimeError, which names the tensor, if an engine's weights differ from the trainer's.
        """

    def close(self) -> None: ...


class Probe(Protocol):
    """A comparison of what the trainer and the engines compute.

    Implemented by trainer.weight_probe.WeightProbe.

    The two steps are separate, because trainer and engines may have to take turns on shared devices.
    """

    def ask_trainer(self) -> None:
        """Compute the expected answers with the trainer."""

    def ask_engines(self) -> dict[str, float]:
        """Compute the engines' answers and return {metric: value}.

        Raises RuntimeError if they differ from the trainer's.
        """
