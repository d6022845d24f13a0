"""The sections `run` and `checkpoint` of the configuration."""

from grpo_megatron.config.options import LONGEST_WAIT, FolderName, PathText, dataclass, option


@dataclass
class RunConfig:
    name: FolderName = option("run", "name of the run; also its folder under run.root")
    root: PathText = option("runs", "folder that holds the runs")
    seed: int = option(
        1234,
        "seed of data order, weights made here, and sampling in the trainer",
        ge=0,
        le=2**31 - 1,
    )
    total_steps: int = option(
        100, "number of rollout-and-train steps (sft, reward-model: optimizer steps)", "steps", gt=0
    )
    resume: PathText | None = option(
        "auto",
        "auto: continue from the newest whole checkpoint of the run's own folder, if there is one; none: "
        "start anew, and move an earlier run of this name aside; or the folder of the checkpoint to continue "
        "from",
    )
    max_restarts: int = option(
        3,
        "how often a run whose rank or engine died or hangs goes on from its newest checkpoint before it "
        "ends",
        ge=0,
    )
    grace: float = option(
        60.0,
        "on SIGINT, SIGTERM or SIGHUP: how long the step that is being done, and a checkpoint, may still "
        "take before the run leaves without them",
        "seconds",
        ge=0,
        le=LONGEST_WAIT,
    )
    grace_usr1: float = option(
        540.0,
        "as run.grace, on SIGUSR1, which a scheduler can send well before it ends a job",
        "seconds",
        ge=0,
        le=LONGEST_WAIT,
    )


@dataclass
class CheckpointConfig:
    minutes: float = option(
        15.0,
        "save a checkpoint after the first step that ends this long after the last one; 0: never",
        "minutes",
        ge=0,
    )
    every: int = option(0, "save a checkpoint every this many steps; 0: by time alone", "steps", ge=0)
    at_end: bool = option(
        True, "save a checkpoint of the last step, from which a raised run.total_steps goes on"
    )
    keep: int = option(
        2, "delete all but the last this many checkpoints, each when its successor is complete", ge=1
    )
    keep_every: int = option(0, "never delete those of every this many steps; 0: none", "steps", ge=0)
    async_save: bool = option(
        True, "training goes on while a checkpoint is written; false: it waits for the disk"
    )
    export_hf: bool = option(True, "write the trained model as an HF checkpoint at the end")
