"""The folder of a run: one run in it, and nothing of another."""

import json
from pathlib import Path

from omegaconf import OmegaConf

from grpo_megatron.config.schema import Config
from grpo_megatron.errors import UserError

METRICS = "metrics.jsonl"


def open_run_folder(config: Config, resumed: int) -> str:
    """Make the run's folder and note its configuration there; returns its absolute path.

    A new run moves what an earlier one left under the same name to NAME.1, NAME.2, ...; a resumed
    run (resumed: the step it continues after) takes back what was logged for later steps.
    Raises UserError if the model to start from would be moved.
    """
    folder = Path(config.run.root, config.run.name).absolute()
    if not config.run.resume and (folder / METRICS).exists():
        for path in (config.model.path, config.ref.path):
            if path and folder in Path(path).absolute().parents:
                raise UserError(f"{path} lies in the folder of this run, {folder}; choose another run.name")
        number = next(n for n in range(1, 10**6) if not folder.with_name(f"{folder.name}.{n}").exists())
        aside = folder.with_name(f"{folder.name}.{number}")
        folder.rename(aside)
        print(f"moved the earlier run of this name to {aside}", flush=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the run's folder {folder} cannot be made: {error}") from error
    if (folder / METRICS).exists():
        rows = (folder / METRICS).read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [row for row in rows if json.loads(row)["step"] <= resumed]
        (folder / METRICS).write_text("".join(kept), encoding="utf-8")
    OmegaConf.save(OmegaConf.structured(config), folder / "config.yaml")
    return str(folder)
