"""Helpers of tests of the importers: configurations of verl and RLinf, and what was said about their keys."""

from pathlib import Path

import yaml

from grpo_megatron.importers import RLINF, VERL, import_settings, read_settings, to_yaml
from grpo_megatron.preflight.check import load_config

DATA = Path(__file__).parent / "data"
VERL_SCRIPT = (DATA / "verl_grpo.sh").read_text()
RLINF_FILE = (DATA / "rlinf_grpo.yaml").read_text()


def imported(system, text):
    return import_settings(system, read_settings(text))


def verl(*arguments):
    """Return a minimal legal verl command with further arguments."""
    base = (
        "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8 "
        "actor_rollout_ref.model.path=/m data.train_files=/d.parquet"
    )
    return imported(VERL, f"python3 -m verl.trainer.main_ppo {base} {' '.join(arguments)}")


def rlinf(**changes):
    tree = yaml.safe_load(RLINF_FILE)
    for key, value in changes.items():
        *sections, name = key.split("__")
        place = tree
        for section in sections:
            place = place[section]
        place[name] = value
    return imported(RLINF, yaml.safe_dump(tree))


def loaded(result, tmp_path):
    path = tmp_path / "imported.yaml"
    path.write_text(to_yaml(result))
    return load_config(str(path), [])


def left(result):
    """Return what was not carried over, whether it changes what is trained or not."""
    return [*result.changes_training, *result.not_carried]


def line_about(lines, key):
    found = [line for line in lines if line.startswith((f"{key}=", f"{key}:", f"{key} "))]
    assert len(found) == 1, (key, lines)
    return found[0]
