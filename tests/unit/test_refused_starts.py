"""A refused start leaves the run's folder unchanged, with everything that another start needs."""

import json
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.cluster.hang_detector import HangDetector
from grpo_megatron.commands import assemble, reward_model, sft, train
from grpo_megatron.config.command import Command
from grpo_megatron.data import EpochOrder, PromptSource
from grpo_megatron.errors import ProcessLost, UserError
from grpo_megatron.monitoring.run_files import TEXTS, read_texts
from grpo_megatron.monitoring.status import StatusFile
from grpo_megatron.monitoring.timeline import TIMELINE, Timeline, read_timeline
from grpo_megatron.run.folder import METRICS, beginning, open_ledger, open_run_folder
from grpo_megatron.run.guard import Guard
from grpo_megatron.run.manifest import DamagedCheckpoint
from grpo_megatron.samples.blocks import LEDGER
from tests.ledgers import used_prompts
from tests.unit.run_folders import EMPTY, NAME, checkpoint, config_of, rows, run_with, state_of


def contents(folder) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "owner.json"
    }


def earlier_run(tmp_path):
    """Write a finished run of eight steps, and a checkpoint of another run after five."""
    folder = run_with(tmp_path, 4, 8, metrics=rows(*range(1, 9)), trained=8)
    (folder / "result.json").write_text("{}")
    (folder / "config.yaml").write_text("the earlier one")
    texts = [{"step": step, "name": "samples/0", "text": "t"} for step in range(1, 9)]
    (folder / TEXTS).write_text("".join(json.dumps(row) + "\n" for row in texts))
    timeline = Timeline(str(folder), 2**20)
    timeline.open()
    for step in range(1, 9):
        timeline.step = step
        timeline.add("driver", "train", float(step), 0.5)
    timeline.close()
    (folder / "tensorboard").mkdir()
    (folder / "tensorboard" / "events.out.tfevents.1").write_bytes(b"")
    # The ledger of the other run is not in this folder.
    return folder, checkpoint(tmp_path / "other", state_of(5, EMPTY | {"last": 1, "end": 2}))


def test_a_checkpoint_of_other_data_is_refused_before_anything_changes(tmp_path):
    folder, other = earlier_run(tmp_path)
    before, seen = contents(folder), []

    def must_fit(state):
        seen.append(state["step"])
        raise UserError("of other data")

    with (
        pytest.raises(UserError, match="of other data"),
        open_run_folder(config_of(tmp_path, str(other)), Command.train, must_fit),
    ):
        pytest.fail("it begins")
    assert seen == [5]
    assert contents(folder) == before


def test_a_damaged_ledger_is_refused_before_anything_changes(tmp_path):
    """It was only read when the folder had been cut back, if the checkpoint was another run's."""
    folder, other = earlier_run(tmp_path)
    damaged = bytearray((folder / LEDGER).read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (folder / LEDGER).write_bytes(damaged)
    before = contents(folder)
    with (
        pytest.raises(UserError, match="is damaged at byte"),
        open_run_folder(config_of(tmp_path, str(other)), Command.train),
    ):
        pytest.fail("it begins")
    assert contents(folder) == before


def source(count: int) -> PromptSource:
    return PromptSource([[Prompt(i, np.array([i]), "", "") for i in range(count)]], seed=0, shuffle=True)


def tell(monkeypatch, module, **instead) -> None:
    for name, value in {
        "finished_result": lambda *_: None,
        "check_start": lambda *_: None,
        **instead,
    }.items():
        monkeypatch.setattr(module, name, value)


@pytest.mark.parametrize("command", ["train", "sft", "reward-model"])
def test_every_command_looks_whether_its_data_are_the_checkpoints(command, tmp_path, monkeypatch):
    config, asked = config_of(tmp_path), []
    config.data.train = "t.jsonl"

    @contextmanager
    def open_run(config, command, guard, must_fit):
        asked.append((command, must_fit))
        raise InterruptedError
        yield

    nothing = {"open_run": open_run, "PromptTokenizer": lambda *_: None}
    if command == "train":
        run, state = train.train, lambda count: {"prompts": source(count).state_dict()}
        given = {
            "offered_tools": lambda *_: None,
            "record_check": lambda *_: None,
            "held_out_prompts": lambda *_: {},
        }
        tell(
            monkeypatch,
            train,
            training_prompts=lambda *_: source(4),
            scores_on_ranks=lambda _: False,
            **given,
            **nothing,
        )
    else:
        module = sft if command == "sft" else reward_model
        run, state = getattr(module, module.__name__.split(".")[-1]), None
        several = (
            {"offered_tools": lambda *_: None, "load_examples": lambda *_: ([0] * 4, 0)}
            if command == "sft"
            else {}
        )
        several = several or {
            "pad_token": lambda _: 0,
            "Conversations": lambda *_: None,
            "_load": lambda *_: [0] * 4,
        }
        tell(monkeypatch, module, **several, **nothing)
        state = lambda count: {"order": EpochOrder(count, config.run.seed, config.data.shuffle).state_dict()}  # noqa: E731
    with pytest.raises(InterruptedError):
        run(config)
    [(name, must_fit)] = asked
    assert name == command
    must_fit(state(4))
    with pytest.raises(UserError, match="the data has changed from 3 records"):
        must_fit(state(3))


@pytest.fixture
def place(monkeypatch):
    """A function that makes the context of a run that begins as run.resume says.

    load: what its ranks do to the checkpoint that they load.
    """
    ranks = SimpleNamespace(load=lambda *_: None)
    checkpoints = SimpleNamespace(load_checkpoint=lambda *given: ranks.load(*given))
    trainer = SimpleNamespace(checkpoints=checkpoints, close=lambda: None)
    monkeypatch.setattr(assemble, "PolicyTrainer", lambda *_: trainer)
    monkeypatch.setattr(assemble, "_throughput", lambda _: None)

    def make(tmp_path, resume, load) -> assemble.RunContext:
        ranks.load = load
        config, folder = config_of(tmp_path, resume), str(tmp_path / NAME)
        start, cluster = beginning(config, Command.train), SimpleNamespace(must_be_whole=lambda: None)
        status, watch = StatusFile(folder, NAME, 100), HangDetector(folder, 600.0)
        return assemble.RunContext(
            config, Command.train, folder, status, start, cluster, watch, None, Guard(), 0.0
        )

    return make


@pytest.mark.slow
@pytest.mark.parametrize("refusal", [DamagedCheckpoint("the ranks say so"), UserError("of another model")])
def test_nothing_changes_until_a_named_checkpoint_has_been_loaded(refusal, place, tmp_path):
    def refused(*_):
        raise refusal

    folder, other = earlier_run(tmp_path)
    before = contents(folder)
    context = place(tmp_path, str(other), refused)
    with (
        pytest.raises(type(refusal)),
        open_run_folder(context.config, Command.train),
        assemble.assemble(context, context.checkpoint),
    ):
        pytest.fail("it begins")
    assert contents(folder) == before
    context = place(tmp_path, str(other), lambda *_: None)
    with assemble.assemble(context, context.checkpoint):
        assert (folder / METRICS).read_text() == rows(*range(1, 6))
        assert [row["step"] for row in read_texts(folder / TEXTS)] == [*range(1, 6), 0]
        steps = [event["args"]["step"] for event in read_timeline(folder / TIMELINE) if event["ph"] == "X"]
        assert steps == [*range(1, 6)]
        assert len([*(folder / "tensorboard").iterdir()]) == 2
        assert f"name: {NAME}" in (folder / "config.yaml").read_text()
        assert used_prompts(folder) == {step: [100 + step] for step in range(1, 9)}
        open_ledger(str(folder), context.checkpoint, replayed=False)
        assert used_prompts(folder) == {}  # the other run's weights have seen none of these samples
        assert not (folder / "result.json").exists()


def test_a_rank_that_is_lost_while_a_named_checkpoint_is_loaded_does_not_bring_back_what_the_user_left(
    place, tmp_path
):
    folder, begun = run_with(tmp_path, 2, 4), []

    def load(*_):
        if len(begun) == 1:
            raise ProcessLost("a rank died")

    def attempt(context, start):
        begun.append(start.step)
        with assemble.assemble(context, start):
            if len(begun) == 2:
                checkpoint(folder / "checkpoints" / "step_00000004", state_of(4))
                raise ProcessLost("later")
        return {}

    context = place(tmp_path, str(folder / "checkpoints" / "step_00000002"), load)
    context.config.run.max_restarts = 2
    assemble.run_with_restarts(context, attempt)
    assert begun == [2, 2, 4]
