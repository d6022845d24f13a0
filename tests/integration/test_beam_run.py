"""Groups from beam search in the whole program."""

import pytest

from grpo_megatron.cli import main
from grpo_megatron.rollout.recording.replay import Replay
from tests.integration.train_runs import arguments, metrics

STEPS = 2


@pytest.mark.slow
def test_beams_are_trained_on_recorded_and_replayed(ray_here, arithmetic, tmp_path):
    common = [
        f"run.total_steps={STEPS}",
        "run.name=beams",
        "rollout.strategy=beam",
        "rollout.beam.length_penalty=0.5",
    ]
    recorded = [*common, f"rollout.record={tmp_path}/recording"]
    assert main(["train", *arguments(arithmetic, tmp_path, *recorded)]) == 0
    rows, replay = metrics(tmp_path, "beams"), Replay(f"{tmp_path}/recording")
    assert len(rows) == STEPS
    for step, row in enumerate(rows, 1):
        # Also of weights that a sync has brought: log-probs are those of the policy that is trained.
        assert 0 < row["mismatch/max"] <= 1e-4
        assert row["staleness/max"] == 0
        for group in replay.read(step):
            found = [tuple(sample.arrays.response_ids.tolist()) for sample in group.samples]
            assert len(set(found)) == 4
            scores = [
                sample.arrays.rollout_logprobs.sum() / len(sample.arrays.response_ids) ** 0.5
                for sample in group.samples
            ]
            assert scores == sorted(scores, reverse=True)
    again = [*common, "run.name=again", f"rollout.replay={tmp_path}/recording"]
    assert main(["train", *arguments(arithmetic, tmp_path, *again)]) == 0
    for row, replayed in zip(rows, metrics(tmp_path, "again"), strict=True):
        assert replayed["actor/loss"] == pytest.approx(row["actor/loss"], abs=1e-6)
        assert replayed["actor/grad_norm"] == pytest.approx(row["actor/grad_norm"], rel=1e-5)
