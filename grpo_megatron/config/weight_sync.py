"""The section `weight_sync` of the configuration."""

from dataclasses import dataclass
from enum import Enum

from grpo_megatron.config.limits import LONGEST_WAIT, Text
from grpo_megatron.config.options import option


class Transport(str, Enum):
    """Carrier of the weights from the trainer to the engines. `auto`: chosen at the start of the run."""

    auto = "auto"
    shared_memory = "shared_memory"
    groups = "groups"
    disk = "disk"


# {(key, value that earlier versions had): what to use instead}
REMOVED_VALUES = {
    ("weight_sync.transport", "object_store"): "use auto, which sends each engine rank its own slices and "
    "compares their digests",
}


class PauseMode(str, Enum):
    retract = "retract"
    in_place = "in_place"
    abort = "abort"


@dataclass
class WeightSyncConfig:
    transport: Transport = option(
        Transport.auto,
        "how weights reach the engines: shared_memory (one node; CUDA IPC on GPUs), groups (NCCL, or gloo on "
        "CPUs), disk (folder), or auto",
    )
    bucket_bytes: int = option(64 * 2**20, "size of the buckets weights travel in", "bytes", above=0)
    delta: bool = option(
        False,
        "send only what changed since the last sync, compressed; exact. Pays over slow links; each rank "
        "keeps a copy of what it sent",
    )
    folder: str | None = option(
        None, "transport=disk: a folder that all nodes see, such as NFS", text=Text.path
    )
    pause: PauseMode = option(
        PauseMode.retract,
        "what becomes of running requests: retract (continue, with their keys and values computed anew), "
        "in_place (continue with the old ones), abort (end them)",
    )
    timeout: float = option(
        1800.0,
        "how long a rank may wait for the next bucket; a sync that moves on may take longer",
        "seconds",
        above=0,
        at_most=LONGEST_WAIT,
    )
    probe_every: int = option(
        50,
        "compare log-probs of fixed prompts after the first sync and then every this many; 0: never",
        "syncs",
        at_least=0,
    )
