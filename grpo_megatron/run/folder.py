"""The folder of a run: it is for one run at a time, and holds nothing of another run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from omegaconf import OmegaConf

from grpo_megatron.config.schema import Config
from grpo_megatron.errors import UserError, shortened
from grpo_megatron.json_files import parse_object
from grpo_megatron.monitoring.run_files import METRICS
from grpo_megatron.paths import file_problem, is_absent, numbered, reading, replace_text, writing
from grpo_megatron.run.checkpoints import CHECKPOINTS, DELETED, TRAINED, discard, folders, step_of
from grpo_megatron.run.lock import Ownership, in_use
from grpo_megatron.run.resume import ANEW, AUTO, RESULT, Checkpoint, newest_checkpoint, open_checkpoint

JOBS = "slurm"  # job outputs; slurm/submit.py queued the jobs for a run of this name


def run_folder(config: Config) -> Path:
    return Path(config.run.root, config.run.name).absolute()


@contextmanager
def open_run_folder(
    config: Config,
    command: str,
    say: Callable[[str], None],
    must_fit: Callable[[dict], str] = lambda state: "",
) -> Iterator[tuple[str, Checkpoint | None]]:
    """Own the run's folder while the context is open.

    Yields the folder's absolute path, and the checkpoint to begin from or None.

    A new run moves what an earlier one left under the same name to NAME.1, NAME.2, ...
    say: shows a line.
    must_fit: raises UserError if a checkpoint's state belongs to other data. It returns a note to show, or
        "".

    Raises UserError if another run writes to the folder, it cannot be created or is damaged, or the
    checkpoint does not fit. The folder is then as it was.
    """
    folder = run_folder(config)
    try:
        ownership = Ownership(folder, say)
        try:
            checkpoint = beginning(config, command, say)
            # Check this now. Later, this run's own checkpoints are already set aside in favour of one from
            # another run.
            note = must_fit(checkpoint.state) if checkpoint else ""
            if note:
                say(note)
            if checkpoint is None and _has_remains(folder):
                _move_aside(config, folder, say)
                ownership.release()
                ownership = Ownership(folder, say)
            if ownership.note:
                say(ownership.note)
            replace_text(folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.structured(config)))
        except BaseException:
            ownership.release()
            raise
    except OSError as error:
        raise UserError(f"the run's folder {folder} cannot be made: {error}") from error
    try:
        if checkpoint is None:
            yield str(folder), None
        else:
            # With `auto` the checkpoint is the run's own, and no other run deletes it. If it were marked as
            # in use, it would be kept beyond checkpoint.keep. A checkpoint that the configuration names must
            # stay, because the next start of this command begins from it too.
            with nullcontext() if config.run.resume == AUTO else in_use(Path(checkpoint.folder)):
                yield str(folder), checkpoint
    finally:
        ownership.release()


def beginning(config: Config, command: str, say: Callable[[str], None]) -> Checkpoint | None:
    """Return the checkpoint that run.resume says to begin from; None for a new run. Changes nothing.

    Also checks that the rows in the run's folder fit the checkpoint. Raises UserError if either is damaged or
    does not fit.
    """
    folder, resume = run_folder(config), config.run.resume
    if resume in ANEW:
        return None
    checkpoint = (
        newest_checkpoint(folder / CHECKPOINTS, command, say)
        if resume == AUTO
        else open_checkpoint(resume, command)
    )
    if checkpoint:
        for name in (METRICS, TRAINED):
            kept_rows(folder / name, checkpoint.step, lambda line: None)  # take_back reports what it removes
    return checkpoint


def take_back(directory: str, checkpoint: Checkpoint | None, say: Callable[[str], None]) -> None:
    """Remove rows of later steps, and what a killed run left half-written, so that the run can go on.

    Call this only when the checkpoint has been loaded and others have been set aside. A start that fails
    before that must leave the rows that belong to the other checkpoints.
    checkpoint: where the run goes on from; None: its beginning.
    say: shows a line.

    Raises UserError for a damaged row of trained.jsonl that would be kept.
    """
    folder, step = Path(directory), checkpoint.step if checkpoint else 0
    for name in (METRICS, TRAINED):
        kept = kept_rows(folder / name, step, say)
        if kept is not None:
            replace_text(folder / name, "".join(kept))
    (folder / RESULT).unlink(missing_ok=True)
    checkpoints = folder / CHECKPOINTS
    for left in [*checkpoints.glob("step_*.partial"), *checkpoints.glob(f"step_*{DELETED}*")]:
        discard(left, say)


def set_aside(directory: str, checkpoint: Checkpoint | None, say: Callable[[str], None]) -> None:
    """Rename other checkpoints of this step or later ones to `step_XXXXXXXX.aside`, `.aside.1`, ...

    They are damaged, or belong to a course of training that was abandoned. Checkpoints with such a name are
    not renamed or deleted: the run may have begun from one of them just now. Call this only when the run's
    checkpoint has been loaded. Until then it is not known that the run can do without the others.
    checkpoint: where the run begins; None: its beginning.
    say: shows a line for each.
    """
    step = checkpoint.step if checkpoint else 0
    for path in folders(Path(directory, CHECKPOINTS)):
        if step_of(path) >= step and not (checkpoint and path.samefile(checkpoint.folder)):
            left = path.with_name(f"{path.name}.aside")
            with writing(path):
                left = path.rename(numbered(left) if left.exists() else left)
            say(f"set aside: {path} is now {left.name}, which no run deletes")


def kept_rows(path: Path, step: int, say: Callable[[str], None]) -> list[str] | None:
    """Return the rows of metrics.jsonl or trained.jsonl up to this step; None if there is no such file.

    The loss of a node may leave half a row or NULs at the end. These are dropped, and so is any damaged row
    of metrics.jsonl, whose curves then have a gap.
    say: shows a line if a row is dropped.

    Raises UserError, which names the row, if trained.jsonl has a damaged row before one that is kept. The
    file would no longer show that no prompt was skipped.
    """
    if is_absent(path):
        return None
    if file_problem(path):
        raise UserError(f"{path} {file_problem(path)}")
    with reading(path):
        rows = path.read_bytes().splitlines(keepends=True)
    kept: list[str] = []
    damaged: list[UserError] = []
    for number, row in enumerate(rows, start=1):
        try:
            of_step = _step_of_row(row, f"{path}:{number}")
        except UserError as error:
            damaged.append(error)
            continue
        if of_step <= step:
            if damaged and path.name == TRAINED:
                raise damaged[0]
            kept.append(row.decode("utf-8"))
    if damaged:
        say(f"{damaged[0]}; damaged rows of {path.name} go, {len(damaged)} in all")
    return kept


def _step_of_row(row: bytes, where: str) -> int:
    step = parse_object(row, where).get("step")
    if not row.endswith(b"\n"):
        raise UserError(f"{where} has no end")
    if type(step) is not int:
        raise UserError(f"{where}: step must be the number of a step, is {shortened(repr(step))}")
    return step


def _has_remains(folder: Path) -> bool:
    """Return True if the folder has something worth keeping."""
    metrics = folder / METRICS
    return (metrics.exists() and metrics.stat().st_size > 0) or bool(folders(folder / CHECKPOINTS))


def _move_aside(config: Config, folder: Path, say: Callable[[str], None]) -> None:
    for path in (config.model.path, config.ref.path):
        if path and folder in Path(path).absolute().parents:
            raise UserError(f"{path} lies in the folder of this run, {folder}; choose another run.name")
    moved = folder.rename(numbered(folder))
    if (moved / JOBS).exists():
        # One of these jobs may have started this run, and Slurm opens a file for each of its nodes by name.
        folder.mkdir(exist_ok=True)
        (moved / JOBS).rename(folder / JOBS)
    say(f"moved the earlier run of this name to {moved}")
