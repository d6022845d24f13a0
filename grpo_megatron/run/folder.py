"""The folder of a run: one run in it, and nothing of another."""

import re
from pathlib import Path

from omegaconf import OmegaConf

from grpo_megatron.config.schema import Config
from grpo_megatron.errors import UserError, shortened
from grpo_megatron.json_files import parse_object
from grpo_megatron.monitoring.run_files import METRICS
from grpo_megatron.paths import file_problem, is_absent

_BEGUN_ROW = re.compile(rb'\{"step": (\d{1,18}),')  # as monitoring.run_files writes it


def open_run_folder(config: Config, resumed: int) -> str:
    """Make the run's folder and note its configuration there; returns its absolute path.

    A new run moves what an earlier one left under the same name to NAME.1, NAME.2, ...; a resumed
    run (resumed: the step it continues after) takes back what was logged for later steps.
    Raises UserError if the model to start from would be moved, and for a folder that cannot be made or is damaged.
    """
    folder = _folder(config)
    try:
        if not config.run.resume and (folder / METRICS).exists():
            _move_aside(config, folder)
        folder.mkdir(parents=True, exist_ok=True)
        take_back(config, resumed)
        OmegaConf.save(OmegaConf.structured(config), folder / "config.yaml")
    except OSError as error:
        raise UserError(f"the run's folder {folder} cannot be made: {error}") from error
    return str(folder)


def take_back(config: Config, resumed: int) -> None:
    """Drop what was logged for steps after the one that the run continues after. Raises UserError as `read_metrics` does."""
    kept = read_metrics(config, resumed)
    if kept is not None:
        (_folder(config) / METRICS).write_text("".join(kept), encoding="utf-8")


def read_metrics(config: Config, resumed: int) -> list[str] | None:
    """The rows of the run's metrics.jsonl up to the step it continues after; None if there is none.

    A killed run may leave half a row at the end: it goes if it is of a later step. Raises UserError, naming the row, for any other
    damage.
    """
    path = _folder(config) / METRICS
    if is_absent(path):
        return None
    if file_problem(path):
        raise UserError(f"{path} {file_problem(path)}")
    kept = []
    for number, row in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        begun = _BEGUN_ROW.match(row)
        if begun and int(begun[1]) > resumed and not row.endswith(b"\n"):
            continue
        step = parse_object(row, f"{path}:{number}").get("step")
        if type(step) is not int:
            raise UserError(f"{path}:{number}: step must be the number of a step, is {shortened(repr(step))}")
        if step <= resumed:
            kept.append(row.decode("utf-8"))
    return kept


def _folder(config: Config) -> Path:
    return Path(config.run.root, config.run.name).absolute()


def _move_aside(config: Config, folder: Path) -> None:
    for path in (config.model.path, config.ref.path):
        if path and folder in Path(path).absolute().parents:
            raise UserError(f"{path} lies in the folder of this run, {folder}; choose another run.name")
    number = next(n for n in range(1, 10**6) if not folder.with_name(f"{folder.name}.{n}").exists())
    aside = folder.with_name(f"{folder.name}.{number}")
    folder.rename(aside)
    print(f"moved the earlier run of this name to {aside}", flush=True)
