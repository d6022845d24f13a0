"""The section `weight_sync` of the configuration."""

from enum import Enum

from grpo_megatron.config.options import LONGEST_WAIT, PathText, dataclass, option


class Transport(str, Enum):
    """Way to send weights from the trainer to the engines. auto: the run chooses one of the others."""

    auto = "auto"
    shared_memory = "shared_memory"
    groups = "groups"
    disk = "disk"


@dataclass
class WeightSyncConfig:
    transport: Transport = option(
        Transport.auto,
        "How weights reach the engines. shared_memory: on one node, with CUDA IPC on GPUs. groups: with "
        "NCCL, or gloo on CPUs. disk: through a folder. auto: chosen for the machines.",
    )
    bucket_bytes: int = option(64 * 2**20, "Size of the buckets in which weights are sent.", "bytes", gt=0)
    delta: bool = option(
        False,
        "true: only what changed since the last sync is sent, compressed and without loss. This is faster "
        "over slow links. Each rank keeps a copy of the weights that it sent last.",
    )
    folder: PathText | None = option(
        None, "Folder that all nodes see, such as one on NFS, for transport=disk."
    )
    timeout: float = option(
        1800.0,
        "Maximum time that a rank waits for the next bucket. A sync that makes progress may take longer.",
        "seconds",
        gt=0,
        le=LONGEST_WAIT,
    )
    probe_every: int = option(
        50,
        "Number of syncs between comparisons of trainer and engines by the log-probs of fixed prompts. The "
        "first sync is followed by one too. 0: never.",
        "syncs",
        ge=0,
    )
