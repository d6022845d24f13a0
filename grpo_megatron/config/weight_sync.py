"""The section `weight_sync` of the configuration."""

from enum import Enum

from grpo_megatron.config.options import LONGEST_WAIT, PathText, dataclass, option


class Transport(str, Enum):
    """Way to send weights from the trainer to the engines. auto: the run chooses one of the others."""

    auto = "auto"
    shared_memory = "shared_memory"
    groups = "groups"
    disk = "disk"


class LoraSync(str, Enum):
    """Form in which LoRA adapters (megatron.lora) reach the engines."""

    merged = "merged"
    adapter = "adapter"


@dataclass
class WeightSyncConfig:
    transport: Transport = option(
        Transport.auto,
        "How weights reach the engines. shared_memory: CUDA IPC, or files in memory on CPUs; every engine "
        "node needs a trainer rank. groups: NCCL, or gloo on CPUs. disk: weight_sync.folder. auto: "
        "shared_memory if possible, else groups.",
    )
    bucket_bytes: int = option(64 * 2**20, "Size of the buckets in which weights are sent.", "bytes", gt=0)
    delta: bool = option(
        False,
        "Send only what changed, losslessly compressed. Each rank then keeps a copy of what it sent.",
    )
    lora: LoraSync = option(
        LoraSync.merged,
        "What is sent with megatron.lora. merged: all weights, with the adapters added to them. adapter: "
        "only the adapters; the engines keep the weights to which these belong.",
    )
    folder: PathText | None = option(None, "Folder for transport=disk, which all nodes share.")
    timeout: float = option(
        1800.0,
        "Maximum time that a rank waits for the next bucket.",
        "seconds",
        gt=0,
        le=LONGEST_WAIT,
    )
    probe_every: int = option(
        50,
        "Interval of comparisons of log-probs between trainer and engines. 0: never.",
        "syncs",
        ge=0,
    )
