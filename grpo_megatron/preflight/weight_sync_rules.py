"""Rules about weight sync, which transfers the trainer's weights to the engines."""

from grpo_megatron.preflight.rule import SYNC_COMMANDS, RuleBook, excludes, needs, only_with

# Each check takes a Config.
WEIGHT_SYNC = RuleBook(
    needs(
        "weight_sync.transport=disk",
        "weight_sync.folder",
        "weights travel through a folder that all nodes see",
    ),
    only_with("weight_sync.lora", "megatron.lora.rank", commands=SYNC_COMMANDS),
    excludes(
        "weight_sync.lora=adapter",
        "cluster.placement=colocated",
        "colocated engines release their weights, to which an adapter would be applied; set "
        "weight_sync.lora=merged",
        SYNC_COMMANDS,
    ),
    excludes(
        "weight_sync.lora=adapter",
        "rollout.engine.data_parallel_attention!=1",
        "SGLang's adapters need attention layers that are split over all ranks; set "
        "rollout.engine.data_parallel_attention=1 or weight_sync.lora=merged",
        SYNC_COMMANDS,
    ),
    only_with("weight_sync.folder", "weight_sync.transport=disk"),
    excludes(
        "weight_sync.delta=true",
        "cluster.placement=colocated",
        "colocated engines release their weights, to which a delta would be applied",
    ),
)
