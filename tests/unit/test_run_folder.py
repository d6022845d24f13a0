"""What a killed run leaves: half a file is one message, or goes with the steps that are taken back."""

import json

import pytest

from grpo_megatron.cli import main
from grpo_megatron.config.schema import Config
from grpo_megatron.errors import UserError
from grpo_megatron.run.checkpoints import read_state
from grpo_megatron.run.folder import METRICS, open_run_folder, read_metrics

STATE = {"step": 3, "totals": {}, "rollouts": {}, "prompts": None, "algorithm": {}}


def checkpoint(folder, state: bytes):
    (folder / "actor").mkdir(parents=True, exist_ok=True)
    (folder / "state.json").write_bytes(state)
    return folder


def test_a_whole_state_is_read(tmp_path):
    assert read_state(str(checkpoint(tmp_path, json.dumps(STATE).encode())), "train") == STATE
    assert read_state(None, "train") is None


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (b"", "is not valid JSON"),
        (json.dumps(STATE).encode()[:-9], "is not valid JSON"),
        (b"[1]", "expected a JSON object"),
        (b"\xff", "is not valid JSON"),
        (b"{}", "has no step, totals"),
        (json.dumps({**STATE, "step": "3"}).encode(), "step must be the number of a step"),
        (json.dumps({**STATE, "step": -1}).encode(), "step must be the number of a step"),
        (json.dumps({"step": 3, "order": {}}).encode(), "this is no checkpoint of `train`"),
    ],
)
def test_a_damaged_state_is_one_message(state, said, capsys, tmp_path):
    checkpoint(tmp_path, state)
    with pytest.raises(UserError, match=r"state\.json") as caught:
        read_state(str(tmp_path), "train")
    assert said in str(caught.value)
    assert main(["config", "check", "model.path=/nowhere", "data.train=/nowhere", f"run.resume={tmp_path}"]) == 2
    assert said in capsys.readouterr().err


def test_a_folder_that_is_no_checkpoint(tmp_path):
    for folder, said in ((tmp_path, "not a whole checkpoint"), (tmp_path / "none", "does not exist")):
        with pytest.raises(UserError, match=said):
            read_state(str(folder), "train")
    partial = checkpoint(tmp_path / "step_00000003.partial", json.dumps(STATE).encode())
    with pytest.raises(UserError, match="not a whole checkpoint"):
        read_state(str(partial), "train")


def run_with(tmp_path, metrics: str | bytes) -> Config:
    config = Config()
    config.run.root, config.run.name, config.run.resume = str(tmp_path), "r", "a checkpoint"
    config.model.path = "m"
    (tmp_path / "r").mkdir(exist_ok=True)
    (tmp_path / "r" / METRICS).write_bytes(metrics if isinstance(metrics, bytes) else metrics.encode())
    return config


def rows(*steps: int) -> str:
    return "".join(json.dumps({"step": step, "loss": 0.5}) + "\n" for step in steps)


def test_a_resumed_run_keeps_the_rows_up_to_its_step(tmp_path):
    open_run_folder(run_with(tmp_path, rows(1, 2, 3, 4)), 2)
    assert (tmp_path / "r" / METRICS).read_text() == rows(1, 2)


def test_half_a_row_of_a_later_step_goes_with_it(tmp_path):
    open_run_folder(run_with(tmp_path, rows(1, 2) + '{"step": 3, "los'), 2)
    assert (tmp_path / "r" / METRICS).read_text() == rows(1, 2)


@pytest.mark.parametrize(
    ("metrics", "place"),
    [
        (rows(1) + '{"step": 2, "los', 2),  # of a step that is kept
        (rows(1) + '{"st', 2),
        (rows(1) + '{"step": 3, "los\n' + rows(3), 2),  # not at the end
        ("\n" + rows(1), 1),
        ("[1]\n" + rows(1), 1),
        ('{"loss": 1}\n', 1),
        (b"\xff\n", 1),
    ],
)
def test_any_other_damage_names_the_row_and_changes_nothing(metrics, place, tmp_path):
    config = run_with(tmp_path, metrics)
    before = (tmp_path / "r" / METRICS).read_bytes()
    with pytest.raises(UserError, match=f"{METRICS}:{place}"):
        open_run_folder(config, 2)
    assert (tmp_path / "r" / METRICS).read_bytes() == before


def test_check_reads_the_metrics_of_the_run_to_continue(capsys, tmp_path):
    run_with(tmp_path, "damaged\n")
    state = checkpoint(tmp_path / "r" / "checkpoints" / "step_00000003", json.dumps(STATE).encode())
    arguments = ["model.path=/nowhere", "data.train=/nowhere", f"run.root={tmp_path}", f"run.resume={state}"]
    assert main(["config", "check", *arguments, "run.name=r"]) == 2
    assert f"{METRICS}:1 is not valid JSON" in capsys.readouterr().err
    assert main(["config", "check", *arguments, "run.name=other"]) == 0


def test_a_run_without_metrics_has_none(tmp_path):
    config = run_with(tmp_path, "")
    (tmp_path / "r" / METRICS).unlink()
    assert read_metrics(config, 2) is None


@pytest.mark.parametrize("name", ["x" * 300, "file/below"])
def test_a_folder_that_cannot_be_made(name, tmp_path):
    (tmp_path / "file").write_text("")
    config = Config()
    config.run.root, config.run.name = str(tmp_path), name
    with pytest.raises(UserError, match="cannot be made"):
        open_run_folder(config, 0)
