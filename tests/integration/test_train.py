"""Whole runs: real ranks, a real engine, Ray, the controller."""

import json
import os
import re
import shutil
import signal
import time
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM

from grpo_megatron.batch.schedule import schedule
from grpo_megatron.batch.token_stream import TokenStream
from grpo_megatron.cli import main
from grpo_megatron.cluster.hang_detector import HangDetector
from grpo_megatron.cluster.placement import allocate
from grpo_megatron.cluster.processes import ProcessDied
from grpo_megatron.config.command import Command
from grpo_megatron.data import PromptTokenizer, load_prompts
from grpo_megatron.monitoring.charts import OTHERS, charts_of
from grpo_megatron.monitoring.run_files import read_texts
from grpo_megatron.monitoring.trajectories import trajectories_of
from grpo_megatron.preflight.check import load_config
from grpo_megatron.rollout.recording.replay import Replay
from grpo_megatron.run.checkpoints import Checkpoints
from grpo_megatron.run.resume import open_checkpoint
from grpo_megatron.trainer.policy import PolicyTrainer
from tests.integration.helpers import digits
from tests.integration.train_runs import STEPS, arguments, assert_same, metrics
from tests.sockets import SocketWatch


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def recorded(ray_here, arithmetic, root):
    """A run with an engine, TP 2, two optimizer steps per batch, and every feature that can be switched
    on.
    """
    changes = [
        "run.name=live",
        f"rollout.record={root}/rollouts",
        f"data.eval={arithmetic}/data/eval.jsonl",
        "eval.every=2",
        "eval.n=2",
        "megatron.tensor_parallel=2",
        "monitor.samples_every=1",
    ]
    with SocketWatch() as sockets:
        assert main(["train", *arguments(arithmetic, root, *changes)]) == 0
    (root / "sockets.json").write_text(
        json.dumps({address: sorted(who) for address, who in sockets.found.items()})
    )
    return root / "live"


def test_a_run_on_one_machine_listens_on_loopback_alone(recorded, root):
    found = json.loads((root / "sockets.json").read_text())
    assert list(found) == ["127.0.0.1"], found


def test_the_engine_agrees_with_the_trainer_at_every_step(recorded, root):
    rows = metrics(root, "live")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(0 < row["mismatch/max"] <= 1e-4 for row in rows)


def test_what_is_logged(recorded, root):
    events = EventAccumulator(str(recorded / "tensorboard")).Reload()
    tags = set(events.Tags()["scalars"])
    expected = {
        "reward/mean",
        "mismatch/max",
        "actor/loss",
        "actor/grad_norm",
        "actor/kl_to_reference",
        "eval/mean@2",
        "time/generate",
    }
    assert expected <= tags
    assert [e.step for e in events.Scalars("mismatch/max")] == [1, 2, 3]
    assert [e.step for e in events.Scalars("eval/greedy")] == [0, 2, 3]
    for row in metrics(root, "live"):
        assert row["actor/optimizer_steps"] == 2
        phases = sum(
            row[name]
            for name in row
            if name.startswith("time/") and name not in ("time/step", "time/monitor")
        )
        assert phases == pytest.approx(row["time/step"], rel=1e-6)


def test_the_timeline_accounts_for_the_steps(recorded):
    events = json.loads((recorded / "timeline.json").read_text())
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    everyone = [event for event in events if event["ph"] == "X"]
    of = {
        name: {event["name"] for event in everyone if names[event["pid"]] == name} for name in names.values()
    }
    assert of["engine 0"] >= {"generate"}
    assert of["trainer rank 0 of 2"] >= {"mini_batches.train_step", "forward_backward", "optimizer"}
    spans = [event for event in everyone if names[event["pid"]] == "driver"]
    steps = [span for span in spans if re.fullmatch(r"step \d+", span["name"])]
    assert [span["name"] for span in steps] == ["step 1", "step 2", "step 3"]
    left = []
    for step in steps:
        inside = [
            span
            for span in spans
            if span not in steps and step["ts"] <= span["ts"] < step["ts"] + step["dur"]
        ]
        left.append(abs(step["dur"] - sum(span["dur"] for span in inside)) / step["dur"])
    # A machine may stop for a second between two phases; a phase that is missing is missing in most steps.
    assert sorted(left)[1] <= 0.02, left
    assert {"generate", "train", "sync", "evaluate", "export"} <= {span["name"] for span in spans}


def test_what_a_run_shows_of_itself(recorded, root, capsys):
    rows = metrics(root, "live")
    # Every scalar of a run has its chart.
    assert OTHERS not in charts_of([name for name in rows[-1] if name != "step"])
    expected = {
        "reward/pass@4",
        "staleness/mean",
        "actor/clip_fraction_high",
        "idle/engines",
        "memory/driver_gib",
        "time/monitor",
    }
    assert expected <= rows[-1].keys()
    assert main(["status", str(recorded)]) == 0
    assert re.search(r"finished .*\n.*3 of 3 done", capsys.readouterr().out)
    assert main(["report", str(recorded), "--against", str(recorded)]) == 0
    page = (recorded / "report.html").read_text()
    for text in ("|delta|", "=== response 4 of 4", "Both have the same configuration", "Held-out prompts"):
        assert text in page


def test_trajectories_are_shown_as_they_were_sampled(recorded, root, arithmetic, capsys):
    """The report has some of each step, with the log-probs of engine and trainer, and the ledger's links."""
    kept = trajectories_of(read_texts(recorded / "texts.jsonl"))
    assert {one.step for one in kept} == {1, 2, 3}
    tokenizer, replay = PromptTokenizer(f"{arithmetic}/model"), Replay(f"{root}/rollouts")
    for one in kept:
        (group,) = [group for group in replay.read(one.step) if group.prompt.uid == one.shown.prompt]
        (sample,) = [own for own in group.samples if own.trajectory_id == one.shown.sample]
        prompt, response = one.shown.nodes
        assert prompt.text == tokenizer.decode_all(sample.arrays.prompt_ids)
        assert response.text == tokenizer.decode_all(sample.arrays.response_ids)
        assert (response.versions, one.shown.version) == ([[one.step, sample.num_response]], one.step)
        assert one.shown.compared == "all"
        for token in one.shown.worst:
            engine = sample.arrays.rollout_logprobs[token.position - sample.num_prompt]
            assert token.engine == pytest.approx(float(engine), abs=1e-6)
            assert token.difference <= 1e-4
    rows = {row["step"]: row for row in metrics(root, "live")}
    for step, row in rows.items():
        of_step = [one.shown for one in kept if one.step == step]
        (worst,) = [shown for shown in of_step if "largest mismatch" in shown.reasons]
        assert worst.worst[0].difference == pytest.approx(row["mismatch/max"], rel=1e-3)
    assert main(["report", str(recorded)]) == 0
    capsys.readouterr()
    assert main(["ledger", str(recorded), "--sample", str(kept[-1].shown.sample)]) == 0
    assert f"report.html#{kept[-1].anchor}" in capsys.readouterr().out
    assert main(["trajectories", str(recorded), "--step", "2", "--out", f"{root}/trees.html"]) == 0
    page = (root / "trees.html").read_text()
    assert page.count('class="trajectory"') == 24
    with_trainer = [one for one in kept if one.step == 2]
    assert page.count("No log-probs of the trainer are known") == 24 - len(with_trainer)


def test_samples_carry_the_version_they_were_made_with(recorded, root):
    replay = Replay(f"{root}/rollouts")
    assert replay.steps == [1, 2, 3]
    for step in replay.steps:
        groups = replay.read(step)
        assert len(groups) == 6
        samples = [sample for group in groups for sample in group.samples]
        assert {span.version for sample in samples for span in sample.weight_spans} == {step}


@torch.no_grad()
def test_the_export_decodes_as_the_run_did(recorded, arithmetic):
    """Greedy decoding of the exported model by transformers has the score of the run's evaluation."""
    result = json.loads((recorded / "result.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(result["model"], dtype=torch.float32).eval()
    tokenizer = PromptTokenizer(result["model"])
    config = load_config(None, [*arguments(arithmetic, "unused")])
    rewards = []
    for prompt in load_prompts(f"{arithmetic}/data/eval.jsonl", tokenizer, config.data)[0]:
        ids = torch.from_numpy(prompt.ids).long()[None]
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)[
            0, ids.shape[1] :
        ]
        rewards.append(digits(None, tokenizer.decode(out.numpy()), None, None))
    assert np.mean(rewards) == pytest.approx(result["after"]["eval/greedy"], abs=0.01)
    assert result["before"]["eval/greedy"] != result["after"]["eval/greedy"]


def replay(arithmetic, root, name, *changes) -> list[dict]:
    assert (
        main(
            [
                "train",
                *arguments(arithmetic, root, f"run.name={name}", f"rollout.replay={root}/rollouts", *changes),
            ]
        )
        == 0
    )
    return metrics(root, name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("tensor_parallel=1", marks=pytest.mark.slow),
        pytest.param("pipeline_parallel=2", marks=pytest.mark.slow),
        pytest.param("data_parallel=2", marks=pytest.mark.slow),
        "data_parallel=2 distributed_optimizer=true overlap=true",
        pytest.param("tensor_parallel=2 pipeline_parallel=2", marks=pytest.mark.slow),
    ],
)
def test_a_recording_trains_the_same_in_every_layout(recorded, arithmetic, root, layout):
    """Three steps from one recorded file. The recording run had TP 2."""
    name = re.sub(r"\W", "_", layout)
    rows = replay(arithmetic, root, name, *(f"megatron.{setting}" for setting in layout.split()))
    assert_same(rows, metrics(root, "live"), rtol=1e-5)
    assert len({row["actor/loss"] for row in rows}) == STEPS


@pytest.fixture(scope="module")
def resumed(recorded, arithmetic, root):
    """Metrics of an undisturbed run ("whole"), and of one that continues in another layout after its
    second step ("rest").
    """
    whole = replay(arithmetic, root, "whole", "checkpoint.every=2")
    checkpoint = root / "whole" / "checkpoints" / "step_00000002"
    assert checkpoint.is_dir()
    assert not list(checkpoint.parent.glob("*.partial"))
    return whole, replay(arithmetic, root, "rest", f"run.resume={checkpoint}", "megatron.tensor_parallel=2")


@pytest.mark.slow
def test_a_resumed_run_continues_as_if_undisturbed(resumed, root):
    whole, rest = resumed
    assert [row["step"] for row in rest] == [3]
    assert_same(rest, whole[2:], rtol=1e-5)
    # From the original weights the third step is another one.
    assert metrics(root, "live")[0]["actor/loss"] != pytest.approx(rest[0]["actor/loss"], rel=1e-3)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over_and_a_finished_run_ends_at_once(
    recorded, arithmetic, root, capsys
):
    """A flipped bit of a weight, which only the ranks can notice.

    Then the same command again, and with more steps.
    """
    whole = replay(arithmetic, root, "bits", "checkpoint.every=2")
    folder = root / "bits"
    shard = folder / "checkpoints" / "step_00000003" / "actor" / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    (folder / "result.json").unlink()
    capsys.readouterr()
    assert_same(replay(arithmetic, root, "bits", "run.resume=auto"), whole, rtol=0)
    said = capsys.readouterr().out
    assert f"skipped a checkpoint: {shard} does not match its digest" in said
    assert f"continues from {folder}/checkpoints/step_00000002" in said
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["step_00000002", "step_00000003", "step_00000003.aside"]
    last_line = said.splitlines()[-1]
    replay(arithmetic, root, "bits", "run.resume=auto")
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2
    assert "is finished: it made 3 of 3 steps" in said[0]
    assert json.loads(said[1]) == json.loads(last_line)


@pytest.mark.slow
def test_a_resumed_run_takes_the_configured_rate(resumed, arithmetic, root):
    checkpoint = root / "whole" / "checkpoints" / "step_00000002"
    rows = replay(arithmetic, root, "slower", f"run.resume={checkpoint}", "optimizer.lr=0.0003")
    # 2 optimizer steps per batch: the fifth and sixth of 20 warm-up steps
    assert rows[0]["actor/lr"] == pytest.approx(0.0003 * (5 + 6) / 2 / 20)


@pytest.mark.slow
def test_a_run_of_the_same_name_is_moved_aside(resumed, arithmetic, root):
    before = (root / "rest" / "metrics.jsonl").read_text()
    rows = replay(arithmetic, root, "rest", "run.total_steps=1", "megatron.pipeline_parallel=2")
    assert [row["step"] for row in rows] == [1]
    assert (root / "rest.1" / "metrics.jsonl").read_text() == before
    assert not list((root / "rest").glob("*.partial"))


def test_a_checkpoint_that_is_not_whole_is_refused(recorded, arithmetic, root, tmp_path, capsys):
    (tmp_path / "state.json").write_text("{}")
    changes = [f"run.resume={tmp_path}", f"rollout.replay={root}/rollouts", "run.name=refused"]
    assert main(["train", *arguments(arithmetic, root, *changes)]) == 2
    assert "not a complete checkpoint" in capsys.readouterr().err


@pytest.mark.slow
def test_a_rank_that_dies_is_named(recorded, arithmetic, root, tmp_path):
    """Its partner waits in a collective meanwhile, and the run does not wait for that to time out.

    The group can be started anew.
    """
    config = load_config(None, arguments(arithmetic, root, "megatron.tensor_parallel=2"))
    config.cluster.call_timeout = 60.0
    ids = [
        np.concatenate([s.arrays.prompt_ids, s.arrays.response_ids])
        for group in Replay(f"{root}/rollouts").read(1)
        for s in group.samples
    ]
    plan = schedule(np.array([len(own) for own in ids]), 128)

    def make(part) -> TokenStream:
        return TokenStream.of([ids[i] for i in part])

    cluster = allocate(config, num_ranks=2, num_engines=0)
    detector = HangDetector(str(tmp_path), 600)
    actor = PolicyTrainer(cluster, config, Command.train, str(tmp_path), detector)

    before = actor.probe(plan, make, 1.0)
    saver = Checkpoints(str(tmp_path / "checkpoints"), config.checkpoint, actor.checkpoints)
    for step in (1, 2):  # the second one completes the first
        saver.save(step, partial(dict, step=step, order={}, tokens=0))
    os.kill(actor.ranks.group.ranks[1].pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(
        ProcessDied, match=r"trainer rank 1 of 2 died in `passes\.probe`.*; its log is .*rank1.log"
    ):
        actor.probe(plan, make, 1.0)
    assert time.monotonic() - start < 120
    # The checkpoint that was being written meanwhile does not come to look complete; the one before it is.
    with pytest.raises(ProcessDied, match=r"trainer rank 1 of 2 died in `checkpoints\.finish`"):
        saver.finish(timeout=30)
    assert sorted(folder.name for folder in saver.folder.iterdir()) == [
        "step_00000001",
        "step_00000002.partial",
    ]
    assert open_checkpoint(saver.folder / "step_00000001", Command.sft).step == 1
    actor.ranks.group.restart()
    assert all(map(np.array_equal, actor.probe(plan, make, 1.0), before))
    actor.close()
    cluster.close()


@pytest.mark.slow
def test_weights_that_are_not_numbers_end_the_run(recorded, arithmetic, root, tmp_path, capsys):
    """The run used to go on, with dropped steps, and to export them."""
    shutil.copytree(arithmetic / "model", tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    changes = [
        "run.name=broken",
        f"rollout.replay={root}/rollouts",
        f"model.path={tmp_path}/model",
        "algorithm.use_kl_loss=false",
    ]
    assert main(["train", *arguments(arithmetic, root, *changes)]) == 2
    said = capsys.readouterr().err
    assert re.search(
        r"1 parameters contain NaN or infinity since they were loaded, such as "
        r"\S*norm\S* on trainer rank 0 of 1",
        said,
    )


@pytest.mark.slow
def test_a_reward_that_is_not_a_number_stops_the_run(ray_here, arithmetic, root, capsys):
    changes = ["run.name=nan", "reward.function=tests.integration.helpers:nan_reward"]
    assert main(["train", *arguments(arithmetic, root, *changes)]) == 2
    message = capsys.readouterr().err
    assert re.search(
        r"error: reward tests.integration.helpers:nan_reward returned nan for record \d+", message
    )
    assert "Traceback" not in message
