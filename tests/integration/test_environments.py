"""Training and evaluation over several turns: real ranks, a real engine, environments in their processes."""

import json
import re

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.cli import main
from grpo_megatron.data import PromptTokenizer
from grpo_megatron.monitoring.run_files import read_texts
from grpo_megatron.monitoring.trajectories import trajectories_of
from grpo_megatron.rollout.recording.replay import Replay
from tests.integration.question_environments import share_of_digits
from tests.integration.train_runs import arguments, metrics
from tests.models import transformers_logprobs

pytestmark = pytest.mark.slow

LONGEST = 48


def several_turns(arithmetic, root, name, *changes):
    tokenizer = PromptTokenizer(f"{arithmetic}/model")
    ends = tokenizer.encode("7;?").tolist()  # turns of an untrained model are then about ten tokens long
    taken = [
        a
        for a in arguments(arithmetic, root)
        if not a.startswith(("reward.function", "rollout.max_response_length"))
    ]
    return [
        *taken,
        f"run.name={name}",
        "run.total_steps=2",
        "rollout.environment=tests.integration.question_environments:three_questions",
        f"rollout.max_response_length={LONGEST}",
        f"rollout.stop_token_ids={ends}",
        "train.max_tokens_per_micro_batch=256",
        *changes,
    ]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def played(ray_here, arithmetic, root):
    """The tokenizer of a run of two steps, with an evaluation before and after and all samples recorded."""
    changes = [f"rollout.record={root}/rollouts", f"data.eval={arithmetic}/data/eval.jsonl", "eval.n=2"]
    changes.append("monitor.samples_every=1")
    assert (
        main(["train", *several_turns(arithmetic, root, "turns", "megatron.tensor_parallel=2", *changes)])
        == 0
    )
    return PromptTokenizer(f"{arithmetic}/model")


def parts(sample):
    """Return the parts of a response in order, as [(whether the model wrote it, ids)]."""
    edges = np.flatnonzero(np.diff(sample.arrays.loss_mask)) + 1
    masks, ids = np.split(sample.arrays.loss_mask, edges), np.split(sample.arrays.response_ids, edges)
    return [(bool(mask[0]), part) for mask, part in zip(masks, ids, strict=True)]


def test_the_model_is_trained_on_its_own_tokens_alone(played, root):
    replay = Replay(f"{root}/rollouts")
    ends, states = set(), []
    for step in (1, 2):
        for group in replay.read(step):
            assert (
                len({played.decode_all(parts(sample)[0][1]) for sample in group.samples}) == 1
            )  # one initial state
            for sample in group.samples:
                (by_model, first), *others = parts(sample)
                state = played.decode_all(first)[1]
                states.append(state)
                assert (by_model, played.decode_all(first)) == (False, f"({state})")
                turns = [ids for mine, ids in others if mine]
                between = [played.decode_all(ids) for mine, ids in others if not mine]
                assert between == [f"<user>{state}?<assistant>"] * (len(turns) - 1)
                assert sample.turns == len(turns) == sample.reward_components["turns"] <= 3
                assert sample.reward == pytest.approx(
                    sum(share_of_digits(played.decode(ids)) for ids in turns)
                )
                assert not sample.arrays.rollout_logprobs[~sample.arrays.loss_mask].any()
                assert (sample.arrays.rollout_logprobs[sample.arrays.loss_mask] < 0).all()
                assert len(sample.arrays.response_ids) <= LONGEST
                in_spans = np.zeros_like(sample.arrays.loss_mask)
                for span in sample.weight_spans:
                    assert span.version == step
                    in_spans[span.start : span.end] = True
                assert np.array_equal(in_spans, sample.arrays.loss_mask)
                ends.add((sample.finish_reason, len(turns)))
    assert ("stop", 3) in ends  # some were played to the end
    assert {reason for reason, _ in ends} == {"stop", "length"}
    assert len(set(states)) > 1


def test_the_report_has_a_node_for_each_turn_and_each_answer_to_it(played, root):
    kept = trajectories_of(read_texts(root / "turns" / "texts.jsonl"))
    assert {one.step for one in kept} == {1, 2}
    for one in kept:
        (sample,) = [
            sample
            for group in Replay(f"{root}/rollouts").read(one.step)
            for sample in group.samples
            if sample.trajectory_id == one.shown.sample
        ]
        prompt, *nodes = one.shown.nodes
        assert (prompt.kind, prompt.text) == ("prompt", played.decode_all(sample.arrays.prompt_ids))
        assert [(node.kind == "written", node.text) for node in nodes] == [
            (by_model, played.decode_all(ids)) for by_model, ids in parts(sample)
        ]
        assert (one.shown.turns, one.shown.components) == (sample.turns, sample.reward_components)
        assert all(token.difference < 1e-4 for token in one.shown.worst)  # none if all are equal
    assert any(one.shown.worst for one in kept)
    assert max(one.shown.turns for one in kept) > 1


def test_engine_and_trainer_agree_over_turns(played, arithmetic, root):
    rows = metrics(root, "turns")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(0 < row["mismatch/max"] <= 1e-4 for row in rows)
    assert all(1 < row["response/turns_mean"] <= 3 for row in rows)
    assert all(row["reward/component/turns"] == row["response/turns_mean"] for row in rows)
    # The first step's samples are of the weights on disk.
    batch = TrainBatch.from_samples(
        [s for group in Replay(f"{root}/rollouts").read(1) for s in group.samples]
    )
    model = AutoModelForCausalLM.from_pretrained(arithmetic / "model", dtype=torch.float32).eval()
    difference = np.abs(batch.rollout_logp - transformers_logprobs(model, batch, 0.9))
    assert difference[batch.loss_mask].max() <= 1e-5


def test_the_evaluation_plays_too_and_from_the_same_states(played, root):
    scores = [json.loads(line) for line in (root / "turns" / "metrics.jsonl").read_text().splitlines()]
    scores = [row for row in scores if "eval/mean@2" in row]
    assert [row["step"] for row in scores] == [0, 2]
    assert all(0 < row["eval/mean@2"] <= 3 and 0 < row["eval/greedy"] <= 3 for row in scores)
    files = sorted((root / "turns" / "eval").glob("*.jsonl"))
    states = [
        [
            [response["text"][:3] for response in json.loads(line)["responses"]]
            for line in file.read_text().splitlines()
        ]
        for file in files
    ]
    assert len(states) == 2
    assert states[0] == states[1]
    assert all(one == other for one, other in states[0])
    assert len({one for one, _ in states[0]}) > 1


def test_a_recording_of_turns_trains_the_same(played, arithmetic, root):
    changes = [f"rollout.replay={root}/rollouts", "megatron.data_parallel=2"]
    assert main(["train", *several_turns(arithmetic, root, "replayed", *changes)]) == 0
    for row, other in zip(metrics(root, "replayed"), metrics(root, "turns"), strict=True):
        # Two replicas sum in another order in float32. The loss may be a small difference of large terms.
        assert row["actor/loss"] == pytest.approx(other["actor/loss"], rel=1e-5, abs=1e-7)
        assert row["response/turns_mean"] == other["response/turns_mean"]


def test_an_environment_that_fails_ends_the_run(ray_here, arithmetic, root, capsys):
    changes = ["rollout.environment=tests.integration.question_environments:Broken"]
    assert main(["train", *several_turns(arithmetic, root, "fails", *changes)]) == 2
    message = capsys.readouterr().err
    assert re.search(
        r"error: environment tests.integration.question_environments:Broken: step\(.*\) on "
        r"record \d+ failed: KeyError",
        message,
    )
    assert "Traceback" not in message
