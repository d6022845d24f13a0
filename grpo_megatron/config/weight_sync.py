"""The section `weight_sync` of the configuration."""

from enum import Enum

from grpo_megatron.config.options import LONGEST_WAIT, PathText, dataclass, option


class SyncTransport(str, Enum):
    auto = "auto"
    shared_memory = "shared_memory"
    groups = "groups"
    disk = "disk"
    object_store = "object_store"


class PauseMode(str, Enum):
    retract = "retract"
    in_place = "in_place"
    abort = "abort"


@dataclass
class WeightSyncConfig:
    transport: SyncTransport = option(
        SyncTransport.auto,
        "how weights reach the engines: shared_memory (one node; CUDA IPC on GPUs), groups (NCCL, or gloo on "
        "CPUs), disk (folder), object_store (full HF tensors through Ray, for engines whose parameters no "
        "weight map describes), or auto",
    )
    bucket_bytes: int = option(64 * 2**20, "size of the buckets weights travel in", "bytes", gt=0)
    delta: bool = option(
        False,
        "send only what changed since the last sync, compressed; exact. Pays over slow links; each rank "
        "keeps a copy of what it sent",
    )
    folder: PathText | None = option(None, "transport=disk: a folder that all nodes see, such as NFS")
    pause: PauseMode = option(
        PauseMode.retract,
        "what becomes of running requests: retract (continue, with their keys and values computed anew), "
        "in_place (continue with the old ones), abort (end them)",
    )
    timeout: float = option(
        1800.0,
        "how long a rank may wait for the next bucket; a sync that moves on may take longer",
        "seconds",
        gt=0,
        le=LONGEST_WAIT,
    )
    probe_every: int = option(
        50,
        "compare log-probs of fixed prompts after the first sync and then every this many; 0: never",
        "syncs",
        ge=0,
    )
