"""The sections `run` and `checkpoint` of the configuration."""

from grpo_megatron.config.options import LONGEST_WAIT, FolderName, PathText, dataclass, option


@dataclass
class RunConfig:
    name: FolderName = option("run", "Name of the run, and of its folder under run.root.")
    root: PathText = option("runs", "Folder that holds the folders of all runs.")
    seed: int = option(
        1234,
        "Seed of the data order, of newly made weights (adapters, the head of a reward model), of sampling "
        "in the engines, and of environments.",
        ge=0,
        le=2**31 - 1,
    )
    total_steps: int = option(
        100,
        "Number of steps of the run. A step generates samples and trains on them; in sft and reward-model "
        "it is one optimizer step.",
        "steps",
        gt=0,
    )
    resume: PathText | None = option(
        "auto",
        "Where the run starts. auto: from the newest complete checkpoint in the run's own folder, if there "
        "is one. none: anew; an earlier run of this name is moved aside. A folder: from this checkpoint.",
    )
    max_restarts: int = option(
        3,
        "Number of times that the run continues from its newest checkpoint after a rank has died or hung, or "
        "all engines for longer than rollout.engine.patience. After that the run ends.",
        ge=0,
    )
    grace: float = option(
        60.0,
        "Time that the run still has for its current step and a checkpoint after SIGINT, SIGTERM or SIGHUP. "
        "Then it ends, even if they are not complete.",
        "seconds",
        ge=0,
        le=LONGEST_WAIT,
    )
    grace_usr1: float = option(
        540.0,
        "The same as run.grace, for SIGUSR1, which a scheduler can send well before it ends a job.",
        "seconds",
        ge=0,
        le=LONGEST_WAIT,
    )


@dataclass
class CheckpointConfig:
    minutes: float = option(
        15.0,
        "Time between checkpoints. One is saved at the end of the step in which this time is over. 0: never.",
        "minutes",
        ge=0,
    )
    every: int = option(
        0, "Number of steps between checkpoints. 0: they are saved only by time, see minutes.", "steps", ge=0
    )
    at_end: bool = option(
        True,
        "true: a checkpoint of the last step is saved. The run can continue from it with a larger "
        "run.total_steps.",
    )
    keep: int = option(
        2, "Number of checkpoints to keep. An older one is deleted when its successor is complete.", ge=1
    )
    keep_every: int = option(
        0,
        "Checkpoints whose step is a multiple of this are never deleted. 0: any can be deleted.",
        "steps",
        ge=0,
    )
    async_save: bool = option(
        True, "true: training goes on while a checkpoint is written. false: training waits for the disk."
    )
    export_hf: bool = option(True, "true: the trained model is written as an HF checkpoint at the end.")
