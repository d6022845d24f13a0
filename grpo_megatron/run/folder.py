"""The folder of a run, which belongs to one run at a time and contains only files of this run.

At its start, a run locks the folder and chooses the checkpoint to begin from. Then it moves or removes files
that do not belong to the run up to this checkpoint, such as later checkpoints. The ledger in the folder
(samples/ledger.py) records what became of each sample of a training run.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from omegaconf import OmegaConf

from grpo_megatron.config.command import Command
from grpo_megatron.config.load import plain
from grpo_megatron.config.schema import Config
from grpo_megatron.errors import UserError
from grpo_megatron.files import numbered, replace_text, writing
from grpo_megatron.monitoring.report.read import CONFIG
from grpo_megatron.monitoring.run_files import METRICS, read_metrics
from grpo_megatron.paths import is_absent
from grpo_megatron.run.checkpoints import CHECKPOINTS, DELETED, discard, folders, step_of
from grpo_megatron.run.lock import OWNER, Ownership, in_use
from grpo_megatron.run.resume import ANEW, AUTO, RESULT, Checkpoint, newest_checkpoint, open_checkpoint
from grpo_megatron.samples.blocks import LEDGER
from grpo_megatron.samples.ledger import Ledger, must_reach, read_books

logger = logging.getLogger(__name__)

JOBS = "slurm"  # subfolder with the outputs of the run's Slurm jobs, which slurm/submit.py queues


def run_folder(config: Config) -> Path:
    return Path(config.run.root, config.run.name).absolute()


@contextmanager
def open_run_folder(
    config: Config,
    command: Command,
    must_fit: Callable[[dict], str] = lambda state: "",
) -> Iterator[tuple[str, Checkpoint | None]]:
    """Create or reopen the run's folder, and lock it against other runs inside the `with` block.

    Yields (folder, checkpoint): the absolute path of the folder, and the checkpoint that the run begins from,
    as run.resume says. `checkpoint` is None for a new run. If a new run finds the folder of an earlier run of
    the same name, that folder is first renamed to NAME.1, NAME.2 or the like. The configuration of a new run
    is written to config.yaml. If there is a checkpoint, call `rewind_folder` once the ranks have loaded it.

    command: the command that makes the run. The checkpoint must be from the same command.
    must_fit: function that checks the driver's state from the checkpoint. It raises UserError if the state
        belongs to other data. Its result is a note to log, or "".

    Raises UserError, and leaves the folder's contents unchanged, in these cases:

    - Another run uses the folder, or the folder cannot be created or written.
    - The folder of an earlier run would be renamed, but contains the model that this run needs.
    - The checkpoint is damaged, or belongs to another command or (`must_fit`) to other data.
    - metrics.jsonl cannot be read, or the ledger (record of all samples) lacks entries (see `beginning`).
    """
    folder = run_folder(config)
    try:
        ownership = Ownership(folder)
        try:
            checkpoint = beginning(config, command)
            # Check this before anything is renamed: if run.resume names a checkpoint of another run, this
            # run's own checkpoints are set aside later.
            note = must_fit(checkpoint.state) if checkpoint else ""
            if note:
                logger.info(note)
            if checkpoint is None and _has_remains(folder):
                _move_aside(config, folder)
            if ownership.note:
                logger.warning(ownership.note)
            if checkpoint is None:
                _write_config(config, folder)
        except BaseException:
            ownership.release()
            raise
    except OSError as error:
        raise UserError(
            f"the run folder {folder} cannot be created or written: {error}; choose another run.root "
            "or run.name"
        ) from error
    try:
        if checkpoint is None:
            yield str(folder), None
        else:
            # With run.resume=auto the checkpoint is the run's own. No other run deletes it, and marking it as
            # in use would keep it beyond checkpoint.keep. A checkpoint that run.resume names must stay,
            # because the next start of this command begins from it too.
            with nullcontext() if config.run.resume == AUTO else in_use(Path(checkpoint.folder)):
                yield str(folder), checkpoint
    finally:
        ownership.release()


def beginning(config: Config, command: Command) -> Checkpoint | None:
    """Return the checkpoint that the run begins from, as run.resume says, or None for a new run.

    With `auto`, this is the newest undamaged checkpoint in the run's own folder; None if there is none. With
    `none`, the result is None. Otherwise run.resume is the folder of a checkpoint. No file is changed.

    Raises UserError if the chosen checkpoint, or with `auto` every checkpoint, is damaged. Also raises
    UserError if a checkpoint belongs to another command, or if metrics.jsonl cannot be read. If a run of
    `train` continues from a checkpoint in its own folder, the ledger (record of all samples) must contain all
    entries that were written before the checkpoint. If it continues from another run's checkpoint, its own
    ledger must not be damaged. Otherwise UserError is raised.
    """
    folder, resume = run_folder(config), config.run.resume
    if resume in ANEW:
        return None
    checkpoint = (
        newest_checkpoint(folder / CHECKPOINTS, command)
        if resume == AUTO
        else open_checkpoint(resume, command)
    )
    if checkpoint:
        if not is_absent(folder / METRICS):
            read_metrics(folder / METRICS)
        if command == Command.train:
            if _is_own(folder, checkpoint):
                must_reach(folder / LEDGER, checkpoint.state["ledger"])
            else:
                read_books(folder / LEDGER)  # all of it, as `open_ledger` will do
    return checkpoint


def open_ledger(directory: str, checkpoint: Checkpoint | None, replayed: bool) -> Ledger:
    """Open the ledger of a run of `train`: the file that records what became of each sample.

    If the run continues from a checkpoint, the ledger then counts samples of later steps as lost.

    directory: the run's folder.
    checkpoint: the checkpoint that the run continues from. None if the run begins at step 0.
    replayed: True if the run trains on recorded samples.

    Call this function only after the ranks have loaded the checkpoint, because it changes the ledger. Raises
    UserError if the ledger does not fit the checkpoint or is damaged.
    """
    if checkpoint is None:
        return Ledger(directory, replayed=replayed)
    own = _is_own(Path(directory), checkpoint)
    return Ledger(directory, checkpoint.step, checkpoint.state["ledger"], own, replayed)


def _is_own(folder: Path, checkpoint: Checkpoint) -> bool:
    """Return True if the checkpoint is in the run's own folder, not in the folder of another run.

    In this case, the ledger in the run's folder records the samples of the steps before the checkpoint.
    """
    return Path(checkpoint.folder).resolve().parent == (folder / CHECKPOINTS).resolve()


def rewind_folder(config: Config, directory: str, checkpoint: Checkpoint | None) -> None:
    """Reset the run's folder to its state at a checkpoint, so that the run can go on from there.

    Checkpoints that the run must not use are renamed. Rows of later steps and damaged lines are removed from
    metrics.jsonl. result.json is deleted, and so are checkpoints that were only partly written or only partly
    deleted. The configuration is written to config.yaml. Other files follow later: Monitor.open cuts texts,
    curves and timeline, and `open_ledger` marks samples of later steps as lost.

    directory: the run's folder.
    checkpoint: the checkpoint that the run continues from. None if the run begins at step 0.

    Call this function only after the ranks have loaded the checkpoint. If this start of the run fails before
    that, the folder must stay as it is: the next start may continue from a later checkpoint, and then needs
    the rows of later steps.
    """
    folder = Path(directory)
    _quarantine_later_checkpoints(folder, checkpoint)
    _trim_metrics(folder / METRICS, checkpoint.step if checkpoint else 0)
    (folder / RESULT).unlink(missing_ok=True)
    checkpoints = folder / CHECKPOINTS
    for left in [*checkpoints.glob("step_*.partial"), *checkpoints.glob(f"step_*{DELETED}*")]:
        discard(left)
    _write_config(config, folder)


def _trim_metrics(metrics: Path, step: int) -> None:
    """Remove the rows of steps after `step`, and damaged lines, from metrics.jsonl."""
    if is_absent(metrics):
        return
    rows, damaged = read_metrics(metrics)
    if damaged:
        logger.warning(f"{metrics}: damaged lines are removed ({damaged})")
    replace_text(metrics, "".join(line for line, row in rows if row["step"] <= step))


def _write_config(config: Config, folder: Path) -> None:
    replace_text(folder / CONFIG, OmegaConf.to_yaml(plain(config)))


def _quarantine_later_checkpoints(folder: Path, checkpoint: Checkpoint | None) -> None:
    """Rename checkpoints that the continued run must not use, to `step_XXXXXXXX.aside` or the like.

    Renamed are all checkpoints in the run's folder of the same step as `checkpoint` or of later steps, except
    `checkpoint` itself. They are damaged, or the run trains their steps again. No folder is overwritten: if
    the new name exists, `.aside.1`, `.aside.2` and so on are used.
    """
    step = checkpoint.step if checkpoint else 0
    for path in folders(folder / CHECKPOINTS):
        if step_of(path) >= step and not (checkpoint and path.samefile(checkpoint.folder)):
            left = path.with_name(f"{path.name}.aside")
            with writing(path):
                left = path.rename(numbered(left) if left.exists() else left)
            logger.info(
                f"renamed {path} to {left.name}, because this run does not use it; delete it if you do not "
                "need it"
            )


def _has_remains(folder: Path) -> bool:
    """Return True if the folder has metrics or checkpoints of an earlier run."""
    metrics = folder / METRICS
    return (metrics.exists() and metrics.stat().st_size > 0) or bool(folders(folder / CHECKPOINTS))


def _move_aside(config: Config, folder: Path) -> None:
    for path in (config.model.path, config.ref.path):
        if path and folder in Path(path).absolute().parents:
            raise UserError(
                f"a new run would rename {folder}, the folder of an earlier run of this name, but the model "
                f"{path} is in it; choose another run.name"
            )
    moved = folder.rename(numbered(folder))
    folder.mkdir()
    (moved / OWNER).rename(folder / OWNER)
    if (moved / JOBS).exists():
        # One of these jobs may have started this run, and Slurm opens its output files there by name.
        (moved / JOBS).rename(folder / JOBS)
    logger.info(f"moved the earlier run with this name to {moved}")
