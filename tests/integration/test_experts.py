"""A model with experts in the whole program: routing replay over several turns, sleeping ranks, exact KL,
GSPO.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from grpo_megatron.cli import main
from grpo_megatron.rollout.recording.replay import Replay
from tests.integration.test_environments import several_turns
from tests.integration.train_runs import metrics

pytestmark = pytest.mark.slow


def run(experts, root, name, *changes) -> list[dict]:
    common = (
        "rollout.history=template",
        "algorithm.ratio_level=sequence",
        "algorithm.loss_agg_mode=seq-mean-token-mean",
        "algorithm.kl_loss_type=full",
        "moe.routing_replay=engine",
        "moe.z_loss_coeff=0.01",
        "rollout.temperature=1.0",
        "train.ppo_mini_batch_size=6",
    )
    assert main(["train", *several_turns(experts, root, name, *common, *changes)]) == 0
    return metrics(root, name)


@pytest.fixture(scope="module")
def live(ray_here, experts, tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    rows = run(
        experts,
        root,
        "live",
        f"rollout.record={root}/rollouts",
        "megatron.pipeline_parallel=2",
        "megatron.recompute=full",
        "megatron.sleep=true",
        "optimizer.offload=true",
    )
    return root, rows


def test_engine_and_trainer_agree_on_the_same_experts(live):
    _, rows = live
    assert all(0 < row["mismatch/max"] <= 1e-4 for row in rows)
    assert all(row["moe/z_loss"] > 0 for row in rows)
    assert rows[0]["actor/kl_to_reference"] == pytest.approx(0, abs=1e-6)
    assert rows[1]["actor/kl_to_reference"] > 1e-6


def test_episodes_of_one_and_of_several_sequences(live):
    """An untrained model writes padding tokens, which the template does not receive, so that its text
    differs.
    """
    root, rows = live
    trajectories = [found for group in Replay(f"{root}/rollouts").read(1) for found in group.trajectories]
    assert {len(found) > 1 for found in trajectories} == {True, False}
    assert any(sample.turns > 1 for found in trajectories for sample in found)
    assert rows[0]["response/sequences_mean"] == np.mean([len(found) for found in trajectories])
    for found in trajectories:
        assert len({sample.reward for sample in found}) == 1


def test_every_sequence_carries_its_experts(live):
    root, _ = live
    for group in Replay(f"{root}/rollouts").read(1):
        for sample in group.samples:
            assert sample.arrays.routing.shape == (sample.num_tokens, 2, 2)
            assert sample.arrays.routing.min() >= 0
            assert sample.arrays.routing.max() < 4
            assert (np.diff(np.sort(sample.arrays.routing, axis=2), axis=2) > 0).all()


def test_ranks_slept_while_the_engine_worked(live):
    _, rows = live
    assert all(0 < row["memory/rank_asleep_gib"] < row["memory/rank_awake_gib"] for row in rows)
    assert all(row["time/sleep"] > 0 for row in rows)


def test_the_same_rollouts_in_another_layout(live, experts):
    root, rows = live
    layout = ("megatron.data_parallel=2", "megatron.expert_parallel=2")
    again = run(experts, root, "again", f"rollout.replay={root}/rollouts", *layout)
    for name in ("actor/loss", "actor/grad_norm", "actor/kl_to_reference", "moe/z_loss"):
        np.testing.assert_allclose(
            [row[name] for row in again], [row[name] for row in rows], rtol=1e-5, atol=1e-7
        )


def test_the_trained_model_loads_in_transformers(live):
    import torch
    from transformers import AutoModelForCausalLM

    root, _ = live
    model = AutoModelForCausalLM.from_pretrained(root / "live" / "hf", dtype=torch.float32)
    assert model.config.num_experts == 4
    index = json.loads(Path(root / "live" / "hf" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 2  # layers come from both ranks
