"""The sections `run` and `checkpoint` of the configuration."""

from grpo_megatron.config.options import LONGEST_WAIT, FolderName, PathText, dataclass, option


@dataclass
class RunConfig:
    name: FolderName = option("run", "Name of the run's folder in run.root.")
    root: PathText = option("runs", "Folder for all runs.")
    seed: int = option(
        1234,
        "Seed of the data order, new weights (adapters, reward model heads), sampling and environments.",
        ge=0,
        le=2**31 - 1,
    )
    total_steps: int = option(
        100,
        "Steps of the run; in sft and reward-model, optimizer steps.",
        "steps",
        gt=0,
    )
    resume: PathText | None = option(
        "auto",
        "Where the run starts. auto: at its newest complete checkpoint, if any. none: from scratch; an "
        "earlier run of this name is moved aside. A folder: at this checkpoint.",
    )
    max_restarts: int = option(
        3,
        "Maximum number of restarts after a rank died or hung, or after rollout.engine.patience.",
        ge=0,
    )
    grace: float = option(
        60.0,
        "Time to finish the step and save a checkpoint after SIGINT, SIGTERM or SIGHUP.",
        "seconds",
        ge=0,
        le=LONGEST_WAIT,
    )
    grace_usr1: float = option(
        540.0,
        "run.grace for SIGUSR1, which a scheduler can send earlier.",
        "seconds",
        ge=0,
        le=LONGEST_WAIT,
    )


@dataclass
class CheckpointConfig:
    minutes: float = option(
        15.0,
        "Time between checkpoints, which are saved at the end of a step. 0: never.",
        "minutes",
        ge=0,
    )
    every: int = option(0, "Interval of further checkpoints. 0: none.", "steps", ge=0)
    at_end: bool = option(
        True,
        "Save the last step, so that the run can continue.",
    )
    keep: int = option(2, "Checkpoints to keep. Older ones are deleted.", ge=1)
    keep_every: int = option(
        0,
        "Keep all checkpoints whose step is a multiple of this. 0: off.",
        "steps",
        ge=0,
    )
    async_save: bool = option(True, "Continue training while a checkpoint is written.")
    export_hf: bool = option(True, "Write the trained model as an HF checkpoint at the end.")
