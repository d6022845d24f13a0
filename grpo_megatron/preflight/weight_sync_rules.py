"""Rules about weight sync, which transfers the trainer's weights to the engines."""

from collections.abc import Iterator

from grpo_megatron.config.schema import Config, Placement
from grpo_megatron.config.weight_sync import Transport
from grpo_megatron.preflight.rule import RuleBook

# Each check takes a Config.
WEIGHT_SYNC = RuleBook()

_TRAIN = ("train",)


@WEIGHT_SYNC.rule(
    "Weights that travel through files need a folder that all nodes see.",
    "weight_sync.transport",
    "weight_sync.folder",
    commands=_TRAIN,
)
def disk_has_a_folder(config: Config) -> Iterator[str]:
    sync = config.weight_sync
    if sync.transport == Transport.disk and sync.folder is None:
        yield "weight_sync.transport=disk needs weight_sync.folder, which all nodes see"
    if sync.transport != Transport.disk and sync.folder is not None:
        yield (
            f"weight_sync.folder={sync.folder} is for weight_sync.transport=disk only, which is "
            f"{sync.transport.value}"
        )


@WEIGHT_SYNC.rule(
    "A delta is of weights that the engines still have, which colocated engines give back while the ranks "
    "train.",
    "weight_sync.delta",
    "cluster.placement",
    commands=_TRAIN,
)
def delta_has_engines_that_keep_weights(config: Config) -> Iterator[str]:
    if config.weight_sync.delta and config.cluster.placement == Placement.colocated:
        yield (
            "weight_sync.delta=true does not work with cluster.placement=colocated, where engines give back "
            "their weights"
        )
