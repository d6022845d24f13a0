"""Rules about weight sync, which transfers the trainer's weights to the engines."""

from grpo_megatron.preflight.rule import RuleBook, excludes, needs, only_with

# Each check takes a Config.
WEIGHT_SYNC = RuleBook(
    needs(
        "weight_sync.transport=disk",
        "weight_sync.folder",
        "weights travel through a folder that all nodes see",
    ),
    only_with("weight_sync.folder", "weight_sync.transport=disk"),
    excludes(
        "weight_sync.delta=true",
        "cluster.placement=colocated",
        "colocated engines release their weights, to which a delta would be applied",
    ),
)
