"""Values that used to pass `config check` and to fail once the processes were up, or never had any effect."""

import os
import socket

import pytest
import torch

from grpo_megatron.config.command import Command
from grpo_megatron.errors import UserError
from grpo_megatron.megatron.memory.parking import Parking
from grpo_megatron.paths import output_folder_problem
from grpo_megatron.preflight.check import check, check_output_folders, load_config
from grpo_megatron.rollout.recording.record import must_be_free


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from make_tiny_model import make

    folder = tmp_path_factory.mktemp("model")
    make(folder, hidden=16, ffn=32, seed=3)
    return str(folder)


def arguments(tmp_path, *changes):
    """Return arguments of a run whose model and data do not exist. These checks do not need them."""
    given = [
        "model.path=/nowhere",
        "data.train=/nowhere.jsonl",
        f"run.root={tmp_path}",
        "data.max_prompt_length=16",
    ]
    return [
        *given,
        "rollout.max_response_length=12",
        "data.train_batch_size=4",
        "train.ppo_mini_batch_size=4",
        *changes,
    ]


def violations(tmp_path, *changes, command=Command.train):
    return check(None, arguments(tmp_path, *changes), command).violations


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        # Seen from outside.
        (
            ["rollout.engine.max_total_tokens=8"],
            "rollout.engine.max_total_tokens must be large enough for the longest request",
        ),
        (
            ["rollout.temperature=1e-300"],
            "rollout.temperature must be at least 0.01 and at most 100: training divides the logits by the ",
        ),
        (
            ["rollout.record=/proc/nope/x"],
            "rollout.record: /proc/nope/x cannot be written to: ",
        ),
        (
            ["megatron.sleep=true", "megatron.offload_folder=README.md"],
            "megatron.offload_folder=README.md is a file, not a folder; it must be a folder that "
            "the run can create and write to",
        ),
        # Of the same kinds.
        (
            ["rollout.engine.max_total_tokens=29"],
            "data.max_prompt_length=16, rollout.max_response_length=12; at least 30 are needed",
        ),
        (["rollout.engine.max_total_tokens=17", "rollout.max_response_length=1"], "at least 23 are needed"),
        (
            ["rollout.engine.max_total_tokens=40", "eval.max_response_length=30", "data.eval=/nowhere.jsonl"],
            "data.max_prompt_length=16, eval.max_response_length=30; at least 48 are needed",
        ),
        (["rollout.temperature=1e-5"], "(rollout.temperature=1.0e-05)"),
        (["rollout.temperature=1e38"], "(rollout.temperature=1.0e+38)"),
        (["rollout.temperature=-1"], "rollout.temperature must be at least 0, but is -1"),
        (["megatron.offload_folder=/proc/nope"], "megatron.offload_folder=/proc/nope cannot be written to: "),
        (
            ["weight_sync.transport=disk", "weight_sync.folder=README.md"],
            "weight_sync.folder=README.md is a file, not a folder",
        ),
        (
            ["weight_sync.transport=disk", "weight_sync.folder=/proc/nope/x"],
            "weight_sync.folder=/proc/nope/x cannot be written",
        ),
        (
            ["run.root=README.md/runs"],
            "run.root=README.md/runs cannot exist, because part of the path is a file",
        ),
        (["run.root=/proc/nope"], "run.root=/proc/nope cannot be written to: "),
        (
            ["rollout.record=README.md/x"],
            "rollout.record: README.md/x cannot exist, because part of the path is a file, not a folder",
        ),
        (
            ["rollout.record=docs"],
            "rollout.record: docs is not a recording; move it away, or choose another path",
        ),
        (
            ["megatron.cpu_threads=100000"],
            "megatron.cpu_threads must be auto, or a whole number from 1 to 1024",
        ),
        (
            ["rollout.engine.cpu_threads=100000"],
            "rollout.engine.cpu_threads must be auto, or a whole number from 1 to 1024",
        ),
        (["reward.workers=100000"], "reward.workers must be at most 1024"),
        (["cluster.call_timeout=1e300"], "cluster.call_timeout must be"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_config_check_refuses_it(tmp_path, changes, says):
    assert says in "\n".join(violations(tmp_path, *changes))


@pytest.mark.parametrize(
    "changes",
    [
        ["rollout.engine.max_total_tokens=30"],
        ["rollout.engine.max_total_tokens=23", "rollout.max_response_length=1"],
        ["rollout.engine.max_total_tokens=30", "eval.max_response_length=900"],  # nothing is evaluated
        ["rollout.temperature=0.01"],
        ["eval.temperature=0"],
        ["optimizer.clip_grad=0"],
        ["rollout.record=TMP/not/yet/there"],
        ["megatron.sleep=true", "megatron.offload_folder=TMP/not/yet"],
    ],
    ids=lambda changes: changes[-1],
)
def test_what_is_right_passes_and_leaves_no_trace(tmp_path, changes):
    before = sorted(tmp_path.rglob("*"))
    assert violations(tmp_path, *(change.replace("TMP", str(tmp_path)) for change in changes)) == []
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("tokens", "absent"),
    [("99999999", "99999999"), ("3,10000", "10000"), (str(2**40), str(2**40)), ("0,3", None), ("", None)],
)
@pytest.mark.parametrize("command", [Command.train, Command.eval])
def test_a_token_that_the_model_cannot_write_ends_no_response(command, tokens, absent, model, tmp_path):
    """The run used to go on, and every response was as long as possible."""
    found = violations(tmp_path, f"model.path={model}", f"rollout.stop_token_ids=[{tokens}]", command=command)
    said = [one for one in found if one.startswith("rollout.stop_token_ids=")]
    assert len(said) == (absent is not None)
    if said:
        assert said[0].startswith(f"rollout.stop_token_ids=[{absent}]: {model} has ")


def test_a_path_that_is_wrong_here_may_be_right_on_the_cluster(tmp_path):
    report = check(
        None, arguments(tmp_path, "run.root=README.md", "cluster.gpu=none", "cluster.nodes=1"), Command.train
    )
    assert not any("run.root" in one for one in report.violations)
    assert any(
        one.startswith("run.root: on this machine, run.root=README.md is a file, not a folder")
        for one in report.not_checked
    )


@pytest.mark.parametrize("key", ["run.root", "megatron.offload_folder", "rollout.record"])
def test_a_path_of_another_machine_is_not_judged(key, tmp_path):
    """The nodes' disks often do not exist where a job is submitted."""
    report = check(None, arguments(tmp_path, f"{key}=/of-the-nodes/x"), Command.train)
    assert report.violations == []
    assert f"{key}: not even the first folder of /of-the-nodes/x is on this machine" in report.not_checked


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["megatron.offload_folder=README.md"], "megatron.offload_folder=README.md is a file"),
        (
            ["weight_sync.transport=disk", "weight_sync.folder=/proc/nope"],
            "weight_sync.folder=/proc/nope cannot be",
        ),
    ],
)
def test_a_start_refuses_it_before_any_process(tmp_path, changes, says):
    """`train` does not check everything that `config check` does."""
    config = load_config(None, arguments(tmp_path, *changes))
    with pytest.raises(UserError) as raised:
        check_output_folders(config, Command.train)
    assert says in str(raised.value)


def test_a_folder_of_the_nodes_is_for_the_ranks_to_say(tmp_path):
    config = load_config(
        None, arguments(tmp_path, "megatron.offload_folder=README.md", "cluster.ray_address=head:1")
    )
    check_output_folders(config, Command.train)
    with pytest.raises(UserError) as raised:
        Parking("README.md")
    assert (
        str(raised.value)
        == f"megatron.offload_folder=README.md is a file, not a folder (on {socket.gethostname()}); "
        "choose another folder"
    )


def test_parking_in_a_folder_that_is_not_there_yet(tmp_path):
    parking = Parking(str(tmp_path / "not" / "yet"))
    tensor = torch.arange(8.0)
    parking.park("x", {0: tensor.untyped_storage()})
    parking.unpark("x")
    assert tensor.tolist() == list(range(8))


def test_places_to_write_to(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    assert output_folder_problem(tmp_path / "a" / "b") is None
    assert output_folder_problem(tmp_path / "file") == "is a file, not a folder"
    assert "cannot exist, because part of the path is a file" in output_folder_problem(
        tmp_path / "file" / "x"
    )
    assert "is a broken symbolic link" in output_folder_problem(tmp_path / "nowhere")
    assert list(tmp_path.glob(".grpo*")) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_permissions(tmp_path):
    (tmp_path / "shut").mkdir(0o500)
    assert "cannot be written to: Permission denied" in output_folder_problem(tmp_path / "shut" / "x")
    with pytest.raises(UserError, match="cannot be written to: Permission denied"):
        must_be_free(str(tmp_path / "shut"))
    (tmp_path / "shut").chmod(0o700)
    (tmp_path / "shut" / "file").write_text('{"format": "grpo_megatron.rollout", "version": 1}\n')
    (tmp_path / "shut").chmod(0o500)
    with pytest.raises(UserError, match=r"cannot be moved away: .* Permission denied"):
        must_be_free(str(tmp_path / "shut" / "file"))
