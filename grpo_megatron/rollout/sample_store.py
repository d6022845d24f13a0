"""The arrays, texts and conversations of finished samples in Ray's object store."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import ray

from grpo_megatron.batch.arrays import RoutingParts, SampleArrays, values_of
from grpo_megatron.batch.sample import Sample
from grpo_megatron.config.schema import Config, RoutingReplay
from grpo_megatron.errors import ProcessLost
from grpo_megatron.model.families import read_architecture
from grpo_megatron.model.parallel_sizes import ParallelSizes

# For each pipeline stage, its layers with experts, as indices among all layers with experts.
RoutedLayers = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class StoredValue:
    """Handle of a value, such as a sample's arrays, in Ray's object store on the node of a rollout worker.

    Each value is an object of its own, because Ray moves whole objects, and the samples of a group may be
    trained on different data-parallel replicas. The driver holds one reference for each group.
    """

    group: ray.ObjectRef
    """Ray's reference to a list of references, one for each value that was stored together with this one."""
    index: int
    """Index of the value in this list."""

    def __reduce__(self):
        # The driver sends and receives several handles for each sequence. A dataclass would pickle to more.
        return StoredValue, (self.group, self.index)

    @classmethod
    def get(cls, handles: Sequence["StoredValue"]) -> list[Any]:
        groups = list(dict.fromkeys(handle.group for handle in handles))
        try:
            members = dict(zip(groups, ray.get(groups), strict=True))
            return ray.get([members[handle.group][handle.index] for handle in handles])
        except ray.exceptions.ObjectLostError as error:
            raise ProcessLost(
                "the arrays of some samples are lost, because the rollout worker that held them has ended, "
                f"or its node is gone: {error}"
            ) from error


def routed_layers(config: Config) -> RoutedLayers:
    """Return how workers divide the MoE routing of samples, so that each rank fetches only its own layers.

    The result has, for each pipeline stage, its layers with experts, as indices among all layers with
    experts. It is () if the routing is not divided, because there is only one stage, the engines' routing is
    not replayed (moe.routing_replay), or the model has no experts.

    Raises UserError if the model's config.json cannot be read.
    """
    sizes = ParallelSizes.from_config(config.megatron)
    if config.moe.routing_replay != RoutingReplay.engine or sizes.pp == 1:
        return ()
    arch = read_architecture(config.model.path)
    if arch.moe is None:
        return ()
    return tuple(map(arch.moe.routed, sizes.stage_layers(arch.num_layers)))


def store_samples(samples: Sequence[Sample], layers: RoutedLayers) -> tuple[Sample, ...]:
    """Put the arrays, texts and conversations of a group's samples into Ray's object store.

    Return copies of the samples, whose handles refer to the values in the store.

    layers: result of `routed_layers`: the layers with experts of each pipeline stage. The recorded experts
        are divided by stage. (): they are not divided.
    """
    arrays = values_of([sample.handle for sample in samples])
    if layers:
        arrays = _divided(arrays, layers)
    texts = values_of([sample.texts for sample in samples])
    given = [sample.conversation for sample in samples if sample.conversation]
    conversations = values_of([conversation.handle for conversation in given])
    handles = iter(_put([*chain.from_iterable(zip(arrays, texts, strict=True)), *conversations]))
    stored = [replace(sample, handle=next(handles), texts=next(handles)) for sample in samples]
    return tuple(
        replace(sample, conversation=replace(sample.conversation, handle=next(handles)))
        if sample.conversation
        else sample
        for sample in stored
    )


def _put(values: Sequence[Any]) -> list[StoredValue]:
    """Put values into Ray's object store, and return their handles in the same order."""
    group = ray.put([ray.put(value) for value in values])
    return [StoredValue(group, index) for index in range(len(values))]


def _divided(samples: Sequence[SampleArrays], layers: RoutedLayers) -> list[SampleArrays]:
    """Put the MoE routing of a group's samples into Ray's object store, divided by pipeline stages.

    Routing is many times as large as the other arrays, so ranks should fetch only the layers of their stage.

    samples: the arrays of each sample, including its routing.
    layers: for each pipeline stage, its layers with experts.

    Returns the arrays with RoutingParts (handles of the parts) in place of the routing.
    """
    routed = [own.routing for own in samples if own.routing is not None]
    handles = iter(_put([routing[:, list(own)] for routing in routed for own in layers]))
    return [
        own
        if own.routing is None
        else replace(own, routing=RoutingParts(layers, tuple(islice(handles, len(layers)))))
        for own in samples
    ]
