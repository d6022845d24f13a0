"""The algorithm in whole runs: real controller and ranks, samples from a recording."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Group, Sample
from grpo_megatron.cli import main
from tests.rollouts import recorder_of

STEPS = 4
LONGEST = 12


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """Samples of random tokens.

    The engine's log-probs belong to no model, so that they are far from any trainer's.
    """
    path = str(tmp_path_factory.mktemp("recording") / "rollouts")
    rng = np.random.default_rng(5)
    recorder = recorder_of(path)
    for step in range(1, STEPS + 1):
        groups = []
        for g in range(4):
            ids = rng.integers(3, 15, 6).astype(np.int32)
            samples = []
            for i in range(3):
                length = int(rng.integers(3, LONGEST + 1))
                samples.append(
                    Sample.of(
                        group_id=g,
                        trajectory_id=3 * g + i,
                        prompt_ids=ids,
                        response_ids=rng.integers(3, 15, length).astype(np.int32),
                        loss_mask=np.ones(length, bool),
                        rollout_logprobs=-3.4 + rng.normal(0, 0.3, length).astype(np.float32),
                        finish_reason="length" if length == LONGEST else "stop",
                        reward=float(rng.integers(0, 2)),
                    )
                )
            groups.append(Group(g, Prompt(g, ids, "", ""), tuple(samples)))
        recorder.write(step, groups)
    return path


@pytest.fixture(scope="module")
def train(ray_here, arithmetic, recording, tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")

    def run(name: str, *changes: str) -> tuple[int, list[dict]]:
        """Return the exit status and the metrics of the steps."""
        arguments = [
            f"run.root={root}",
            f"run.name={name}",
            f"run.total_steps={STEPS}",
            f"model.path={arithmetic}/model",
            f"rollout.replay={recording}",
            f"rollout.max_response_length={LONGEST}",
            "rollout.n=3",
            "data.train_batch_size=4",
            "train.ppo_mini_batch_size=4",
            "data.max_prompt_length=16",
            "reward.workers=1",
            "megatron.precision=fp32",
            "optimizer.lr=0.003",
            "mismatch.action=off",
            "checkpoint.export_hf=false",
            *changes,
        ]
        status = main(["train", *arguments])
        lines = (Path(root) / name / "metrics.jsonl").read_text().splitlines()
        return status, [json.loads(line) for line in lines]

    run.root = root
    return run


EVERYTHING = [
    "megatron.tensor_parallel=2",
    "train.ppo_mini_batch_size=2",
    "algorithm.preset=reinforce_pp",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.horizon=100",
    "algorithm.use_kl_loss=true",
    "algorithm.entropy_coeff=0.5",
    "algorithm.entropy_floor=3.3",
    "algorithm.overlong_filter=true",
    "reward.overlong_buffer.length=4",
    "mismatch.correction=tis",
    "ref.reset_every=2",
    "checkpoint.every=3",
]


@pytest.fixture(scope="module")
def everything(train):
    status, rows = train("everything", *EVERYTHING)
    assert status == 0
    return rows


@pytest.mark.slow
def test_the_kl_in_the_reward_and_its_coefficient(everything):
    """The reference is reset after step 2, to the policy of step 3."""
    kl = [row["actor/kl_in_reward"] for row in everything]
    assert kl[0] == pytest.approx(0, abs=1e-6)
    assert kl[1] != pytest.approx(0, abs=1e-4)
    assert kl[2] == pytest.approx(0, abs=1e-6)
    coefficient = 0.01
    for row in everything:
        assert row["actor/kl_coef"] == pytest.approx(coefficient)
        trajectories = 12 * (1 - row["response/truncated"])  # the others are not trained on
        coefficient *= 1 + np.clip(row["actor/kl_in_reward"] / 0.1 - 1, -0.2, 0.2) * trajectories / 100


@pytest.mark.slow
def test_resuming_makes_the_same_steps(train, everything):
    """The checkpoint also has the KL coefficient, the entropy and the reference."""
    folder = train.root / "everything" / "checkpoints" / "step_00000003"
    status, rows = train("resumed", *EVERYTHING, f"run.resume={folder}")
    assert status == 0
    for expected, row in zip(everything[3:], rows, strict=True):
        for name, value in expected.items():
            if not name.startswith(("time/", "throughput/", "idle/", "memory/")):
                assert row[name] == pytest.approx(value, rel=1e-6, abs=1e-7, nan_ok=True), name


@pytest.mark.slow
def test_the_entropy_floor(train):
    """Entropy begins at 3.4.

    With a floor of 9 the bonus acts from step 2 on; with a floor of 1 it never does.
    """
    runs = {
        name: [row["actor/loss"] for row in train(f"entropy_{name}", "run.total_steps=2", *changes)[1]]
        for name, changes in {
            "none": [],
            "low": ["algorithm.entropy_coeff=0.5", "algorithm.entropy_floor=1"],
            "high": ["algorithm.entropy_coeff=0.5", "algorithm.entropy_floor=9"],
        }.items()
    }
    assert runs["low"] == runs["none"]
    assert runs["high"][0] == runs["none"][0]
    assert runs["high"][1] == pytest.approx(runs["none"][1] - 0.5 * 3.4, abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("old_logprobs", ["recompute", "current", "rollout"])
def test_a_mismatch_stops_the_run(train, capsys, old_logprobs):
    name = f"stop_{old_logprobs}"
    status, rows = train(
        name, f"train.old_logprobs={old_logprobs}", "mismatch.action=stop", "mismatch.threshold=0.2"
    )
    assert status == 2
    assert rows == []
    said = capsys.readouterr().err
    assert "step 1: engine and trainer differ by up to" in said
    assert len([line for line in said.splitlines() if line.startswith("|delta|")]) == 5


@pytest.mark.slow
def test_a_mismatch_is_told(train, capsys):
    status, rows = train(
        "warn", "train.old_logprobs=current", "mismatch.action=warn", "mismatch.threshold=0.2"
    )
    assert status == 0
    assert capsys.readouterr().out.count("engine and trainer differ") == STEPS
    assert all(row["mismatch/max"] > 0.2 for row in rows)
    assert rows[0]["mismatch/ratio_p01"] < rows[0]["mismatch/ratio_p50"] < rows[0]["mismatch/ratio_p99"]


@pytest.mark.slow
def test_known_before_or_in_the_forward_masks_the_same_tokens(train):
    masking = ["run.total_steps=1", "mismatch.action=mask", "mismatch.threshold=0.2"]
    (before,) = train("mask_before", *masking)[1]
    (forward,) = train("mask_forward", *masking, "train.old_logprobs=current")[1]
    assert 0.1 < before["mismatch/masked"] < 0.9
    assert forward["mismatch/masked"] == pytest.approx(before["mismatch/masked"])
    assert before["actor/loss"] == pytest.approx(forward["actor/loss"], rel=1e-4)
    (renormalized,) = train("mask_renormalized", *masking, "mismatch.renormalize=true")[1]
    # token-mean: over those that are left
    assert renormalized["actor/loss"] * (1 - before["mismatch/masked"]) == pytest.approx(
        forward["actor/loss"], rel=1e-4
    )


@pytest.mark.slow
def test_a_policy_loss_from_a_module_of_ones_own(train):
    (plain,) = train("plain", "run.total_steps=1", "algorithm.surrogate=reinforce")[1]
    (own,) = train("own", "run.total_steps=1", "algorithm.surrogate=tests.integration.surrogates:doubled")[1]
    assert own["actor/loss"] == pytest.approx(2 * plain["actor/loss"])
    assert own["actor/grad_norm"] == pytest.approx(2 * plain["actor/grad_norm"], rel=1e-5)


@pytest.mark.slow
def test_a_step_in_which_nothing_is_trained_is_dropped(train, recording, tmp_path):
    shutil.copytree(recording, tmp_path / "cut")
    for rows in (tmp_path / "cut").glob("step_*.json"):
        rows.write_text(rows.read_text().replace('"finish_reason": "stop"', '"finish_reason": "length"'))
    status, rows = train("cut", f"rollout.replay={tmp_path}/cut", "algorithm.overlong_filter=true")
    assert status == 0
    assert [row["actor/dropped_steps"] for row in rows] == [1.0] * STEPS
