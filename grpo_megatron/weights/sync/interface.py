"""Protocols of the parts of a weight sync: trainer, engines, transport and comparison of their outputs."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import ray

from grpo_megatron.cluster.processes import Process
from grpo_megatron.weights.sync.order import Order


class WeightSource(Protocol):
    """The trainer, whose ranks are `processes`. Implemented by trainer.weights.TrainerWeights."""

    processes: list[Process]

    def sync_order(self, order: Order) -> list[ray.ObjectRef]:
        """Make every trainer rank carry out its side of an order. Return one reference per rank's Answer."""

    def weight_stream(self, max_bytes: int) -> AbstractContextManager[Iterator[ray.ObjectRef]]:
        """Return a context that yields all weights as full HF tensors, for ObjectStore.

        It yields references to weights.buckets.Bucket of at most `max_bytes` bytes each. The caller must
        consume all of them, because building a bucket is a collective operation of the trainer's ranks.
        """


class WeightTarget(Protocol):
    """The engines. `processes` has one process per engine. Implemented by sglang.pool.EnginePool.

    Between `begin_update` and `end_update` (the update session) the engines serve no requests. If anything
    fails in between, their weights are undefined, and they must not serve again.
    """

    processes: list[Process]

    def begin_update(self) -> None: ...

    def sync_order(self, order: Order) -> list[ray.ObjectRef]:
        """Make every engine carry out its side of an order.

        Return one reference per engine, to the list of its ranks' Answers.
        """

    def load_bucket(self, bucket: ray.ObjectRef) -> list[str]:
        """Load the full HF tensors of a weights.buckets.Bucket into every engine. Return their HF names."""

    def end_update(self, version: int) -> None:
        """Resume serving. The engines' samples report `version` as their weight version from now on."""


class Transport(Protocol):
    """A method of transferring the weights from the trainer (`source`) to the engines (`target`).

    It is called between `begin_update` and `end_update` of the engines.
    """

    def transfer(self, source: WeightSource, target: WeightTarget, version: int) -> dict[str, float]:
        """Transfer all weights, verify them as far as this transport can, and return {metric: value}.

        version: version number of these weights.
        Raises RuntimeError if an engine's weights differ from the trainer's. The message names the tensors.
        """

    def close(self) -> None: ...


class Probe(Protocol):
    """A comparison of what the trainer and the engines compute after a weight sync.

    It detects errors that checksums cannot: right weights that an engine uses differently. Implemented by
    trainer.weight_probe.WeightProbe. The two steps are separate methods, because trainer and engines may have
    to take turns on devices that they share.
    """

    def ask_trainer(self) -> None:
        """Compute the expected outputs with the trainer, and keep them."""

    def ask_engines(self) -> dict[str, float]:
        """Compute the same outputs with the engines, compare them, and return {metric: value}.

        Raises RuntimeError if they differ from the trainer's.
        """
