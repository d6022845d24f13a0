"""Checkpoints and run folders that the driver accepts, made without any rank."""

import json
from pathlib import Path

from grpo_megatron.config.schema import Config
from grpo_megatron.run.folder import METRICS
from grpo_megatron.run.manifest import record_of, write_manifest
from grpo_megatron.run.resume import as_saved
from grpo_megatron.samples.books import Books
from grpo_megatron.samples.ledger import Ledger
from tests.unit.ledger_steps import group, train

NAME = "r"
# Summary of a ledger without entries.
EMPTY = Books().summary() | {"last": 0, "end": 0, "tokens": 0, "prompts": 0}
STATE = {"totals": {}, "rollouts": {}, "prompts": None, "algorithm": {}, "trainer": {}, "evaluations": {}}
STATE |= {"ledger": EMPTY}


def config_of(root: Path, resume: str | None = "auto") -> Config:
    config = Config()
    config.run.root, config.run.name, config.run.resume = str(root), NAME, resume
    config.model.path = "m"
    return config


def checkpoint(folder: Path, state: dict | bytes) -> Path:
    """Write a checkpoint with a correct manifest, whatever the state is."""
    (folder / "actor").mkdir(parents=True)
    (folder / "actor" / "weights").write_bytes(bytes(range(256)))
    (folder / "state.json").write_bytes(state if isinstance(state, bytes) else json.dumps(state).encode())
    write_manifest(folder, {name: record_of(folder / name) for name in ("state.json", "actor/weights")})
    return folder


def state_of(step: int, ledger: dict = EMPTY) -> dict:
    return {"step": step, **STATE | {"ledger": ledger}, "config": as_saved(config_of(Path("somewhere")))}


def run_with(root: Path, *steps: int, metrics: str | bytes | None = None, trained: int = 0) -> Path:
    """Write the folder of a run that has saved these steps.

    trained: number of steps in its ledger.
    """
    folder = root / NAME
    folder.mkdir(parents=True, exist_ok=True)
    summaries, ledger = {}, Ledger(str(folder))
    for step in range(1, trained + 1):
        train(ledger, step, [group(step)])
        summaries[step] = ledger.state_dict()
    for step in steps:
        checkpoint(folder / "checkpoints" / f"step_{step:08d}", state_of(step, summaries.get(step, EMPTY)))
    if metrics is not None:
        (folder / METRICS).write_bytes(metrics if isinstance(metrics, bytes) else metrics.encode())
    return folder


def rows(*steps: int) -> str:
    return "".join(json.dumps({"step": step, "loss": 0.5}) + "\n" for step in steps)
