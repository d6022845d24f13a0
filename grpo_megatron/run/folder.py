"""The folder of a run: one run in it, and nothing of another."""

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

JOBS = "slurm"  # the outputs of the jobs that slurm/submit.py queued for a run of this name


def run_folder(config: Config) -> Path:
    return Path(config.run.root, config.run.name).absolute()


@contextmanager
def open_run_folder(
    config: Config,
    command: str,
    say: Callable[[str], None],
    must_fit: Callable[[dict], str] = lambda state: "",
) -> Iterator[tuple[str, Checkpoint | None]]:
    """Within this context the run owns its folder.

    Gives the absolute path and the checkpoint to begin from, or None.

    A new run moves what an earlier one left under the same name to NAME.1, NAME.2, ... say: shows a line.
    must_fit: raises UserError for a checkpoint's state that is of other data, and returns a note to show, or
    an empty text. Raises UserError for a folder that another run writes to, that cannot be made or is
    damaged, and for a checkpoint that does not fit; the folder is then as it was.
    """
    folder = run_folder(config)
    try:
        ownership = Ownership(folder, say)
        try:
            checkpoint = beginning(config, command, say)
            # Now, because later this run's own checkpoints are set aside already, for one of another run.
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
            # With auto it is the run's own, which no other run deletes: in use it would be kept beyond checkpoint.keep. One that is named
            # is where the next start of this command begins, too.
            with nullcontext() if config.run.resume == AUTO else in_use(Path(checkpoint.folder)):
                yield str(folder), checkpoint
    finally:
        ownership.release()


def beginning(config: Config, command: str, say: Callable[[str], None]) -> Checkpoint | None:
    """What run.resume says to begin from, which the rows of the run's folder fit; None for a new run. Changes nothing.

    Raises UserError where either is damaged or does not fit.
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
            kept_rows(folder / name, checkpoint.step, lambda line: None)  # take_back says what goes
    return checkpoint


def take_back(directory: str, checkpoint: Checkpoint | None, say: Callable[[str], None]) -> None:
    """A run goes on from a checkpoint, None: from its beginning: rows of later steps, and what a killed run left half-written, go.

    Only when it has been loaded, and others have been set aside: a start that is refused until then leaves the rows of those that it
    did not touch. say: shows a line. Raises UserError for a damaged row of trained.jsonl that would be kept.
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
    """Other checkpoints of this or later steps, which are damaged or of a course that was abandoned, become `step_XXXXXXXX.aside`,
    `.aside.1`, ..., which is said.

    What has such a name stays: the run may have begun from it just now. Only when the checkpoint, None: the beginning, has been
    loaded: until then it is not known that the run can do without them.
    """
    step = checkpoint.step if checkpoint else 0
    for path in folders(Path(directory, CHECKPOINTS)):
        if step_of(path) >= step and not (checkpoint and path.samefile(checkpoint.folder)):
            left = path.with_name(f"{path.name}.aside")
            with writing(path):
                left = path.rename(numbered(left) if left.exists() else left)
            say(f"set aside: {path} is now {left.name}, which no run deletes")


def kept_rows(path: Path, step: int, say: Callable[[str], None]) -> list[str] | None:
    """The rows of metrics.jsonl or trained.jsonl up to this step; None if there is no such file.

    The loss of a node may leave half a row or NULs at the end: that goes, and so does any damaged row of metrics.jsonl, whose curves
    then have a gap. say: shows a line if there is any. Raises UserError, naming the row, for a damaged one of trained.jsonl before one
    that is kept, because the file would no longer show that no prompt was skipped.
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
    """Whether there is something worth keeping."""
    metrics = folder / METRICS
    return (metrics.exists() and metrics.stat().st_size > 0) or bool(folders(folder / CHECKPOINTS))


def _move_aside(config: Config, folder: Path, say: Callable[[str], None]) -> None:
    for path in (config.model.path, config.ref.path):
        if path and folder in Path(path).absolute().parents:
            raise UserError(f"{path} lies in the folder of this run, {folder}; choose another run.name")
    moved = folder.rename(numbered(folder))
    if (moved / JOBS).exists():
        # One of these jobs may be what starts this run, and Slurm opens a file of each of its nodes by its name.
        folder.mkdir(exist_ok=True)
        (moved / JOBS).rename(folder / JOBS)
    say(f"moved the earlier run of this name to {moved}")
