"""A session of a user's own loop, with a real engine and two replicas."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_megatron.api import AdamOptions, Datum, load, open_session
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.errors import UserError
from tests.models import transformers_logprobs

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5


def configured(arithmetic, root, *changes):
    return load(
        None,
        [
            f"run.root={root}",
            "run.name=session",
            f"model.path={arithmetic}/model",
            "rollout.max_response_length=12",
            "rollout.temperature=0.9",
            "rollout.engine.dtype=float32",
            "rollout.engine.max_total_tokens=8192",
            "algorithm.use_kl_loss=true",
            "train.max_tokens_per_micro_batch=128",
            "megatron.precision=fp32",
            "megatron.data_parallel=2",
            "optimizer.lr=0.01",
            *changes,
        ],
    )


@pytest.fixture(scope="module")
def config(ray_here, arithmetic, tmp_path_factory):
    return configured(arithmetic, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def session(config):
    with open_session(config) as session:
        yield session


PROMPTS = ["12+34", "7-5", [5, 6, 7], np.array([8, 9])]


def as_data(groups, advantage=1.0):
    return [Datum.of(sample, advantage) for group in groups for sample in group]


def must_be_of_the_weights(session, samples, reference=False):
    """Check that samples have the log-probs of the trainer's present weights."""
    data = [Datum.of(sample, 1.0) for sample in samples]
    found = session.log_probs([one.tokens for one in data], reference)
    for one, logp in zip(data, found, strict=True):
        trained = one.weight > 0
        assert np.abs(logp - one.logprobs)[trained].max() < TOLERANCE


def test_samples_have_the_log_probs_of_transformers_and_of_the_trainer(session, arithmetic):
    groups = session.sample(PROMPTS, n=3, max_tokens=10)
    samples = [sample for group in groups for sample in group]
    assert [len(group) for group in groups] == [3] * 4
    assert {sample.reward for sample in samples} == {None}
    assert max(sample.num_response for sample in samples) <= 10
    assert samples[-1].arrays.prompt_ids.tolist() == [8, 9]
    must_be_of_the_weights(session, samples)
    must_be_of_the_weights(session, samples, reference=True)
    batch = TrainBatch.from_samples(samples)
    model = AutoModelForCausalLM.from_pretrained(f"{arithmetic}/model", dtype=torch.float32).eval()
    fresh = transformers_logprobs(model, batch, temperature=0.9)
    assert np.abs(fresh - batch.rollout_logp)[batch.loss_mask].max() < TOLERANCE


def test_weights_reach_the_engines_by_publish_and_a_load_brings_back_the_saved_ones(session):
    """The first request after a load must not use the weights from before it (a published bug)."""
    saved, before = session.save(), session.sample(PROMPTS, n=2)
    version, step = session.version, session.step
    result = session.forward_backward(as_data(before), "clip")
    for datum, logp in zip(as_data(before), result.logprobs, strict=True):
        assert np.abs(logp - datum.logprobs)[datum.weight > 0].max() < TOLERANCE
        assert (logp[datum.weight == 0] == 0).all()
    outcome = session.optim_step(AdamOptions(lr=0.02))
    assert (outcome.dropped, outcome.lr, session.step) == (False, 0.02, step + 1)
    stale = session.sample(PROMPTS[:2], n=2)
    assert {span.version for group in stale for one in group for span in one.weight_spans} == {version}
    with pytest.raises(AssertionError):
        must_be_of_the_weights(session, stale[0])
    assert session.publish() == version + 1
    fresh = session.sample(PROMPTS, n=2)
    must_be_of_the_weights(session, [sample for group in fresh for sample in group])
    session.log({"reward/mean": 0.5})
    later = session.save()
    session.load(saved)
    assert session.step == step
    assert session.save() == saved  # the same weights
    session.forward_backward(as_data(before, advantage=-1.0), "clip")
    session.optim_step()
    with pytest.raises(UserError, match="has other weights, from before `load`"):
        session.save()
    assert session.save(replace=True) == later
    session.load(saved)
    [row] = [json.loads(line) for line in Path(session.directory, "metrics.jsonl").read_text().splitlines()]
    assert (row["step"], row["reward/mean"]) == (step + 1, 0.5)
    assert row["time/generate"] > 0
    assert row["time/train"] > 0
    again = session.sample(PROMPTS, n=2)
    samples = [sample for group in again for sample in group]
    must_be_of_the_weights(session, samples)
    must_be_of_the_weights(session, samples, reference=True)  # the weights at the start


def test_fewer_sequences_than_replicas_and_gradients_that_add_up(session):
    """One sequence of two calls has the gradient of the same sequence with twice the weight."""
    [[sample]] = session.sample(["1+2"], n=1)
    session.forward_backward([Datum.of(sample, 1.0)], "cross_entropy")
    session.forward_backward([Datum.of(sample, 1.0)], "cross_entropy")
    twice = session.optim_step(AdamOptions(lr=0.0)).grad_norm
    loss = session.forward_backward([Datum.of(sample, 1.0, weight=2.0)], "cross_entropy").metrics[
        "actor/loss"
    ]
    assert session.optim_step(AdamOptions(lr=0.0)).grad_norm == pytest.approx(twice, rel=1e-4)
    logp = sample.arrays.rollout_logprobs
    assert loss == pytest.approx(
        -2 * session.log_probs([Datum.of(sample, 1).tokens])[0][-len(logp) :].sum(), rel=1e-4
    )


def minus_advantage_times_ratio(logp, entropy, inputs):
    ratio = torch.exp(logp - torch.where(inputs.mask, inputs.old_logp, logp.detach()))
    return -inputs.advantage * ratio


def test_a_function_as_the_loss_and_what_is_refused(session):
    groups = session.sample(PROMPTS, n=2)
    data = as_data(groups, advantage=0.5)
    own = session.forward_backward(data, minus_advantage_times_ratio)
    assert own.metrics["actor/loss"] == pytest.approx(-0.5 * sum(one.weight.sum() for one in data), rel=1e-3)
    with pytest.raises(UserError, match="save: there are gradients"):
        session.save()
    untrained = session.optim_step(AdamOptions(lr=0.0))
    assert untrained.grad_norm > 0
    with pytest.raises(UserError, match="call forward_backward before"):
        session.optim_step()
    with pytest.raises(UserError, match=r"needs Datum.reference; log_probs\(.., reference=True\)"):
        session.forward_backward(data)
    with pytest.raises(UserError, match="surrogate"):
        session.forward_backward(data, "clipped")
    with pytest.raises(UserError, match="token id outside"):
        session.log_probs([[1, 10**6]])
    with pytest.raises(UserError, match="lower max_tokens"):
        session.sample([[5] * session.longest])
    with pytest.raises(UserError, match="from which the model was loaded"):
        session.save_hf(session.config.model.path)  # all ranks raise, and go on
    with pytest.raises(UserError, match="logprobs for all of its data"):
        session.forward_backward([data[0], Datum(data[0].tokens, data[0].weight)], "clip")
    session.forward_backward([one.without_weight() for one in data], "clip")
    assert session.optim_step().dropped


def test_engines_on_the_trainers_devices(ray_here, arithmetic, tmp_path):
    config = configured(arithmetic, tmp_path, "cluster.placement=colocated", "megatron.data_parallel=1")
    with open_session(config) as session:
        groups = session.sample(PROMPTS, n=2)
        session.forward_backward(as_data(groups), "clip")
        for verb in (session.publish, lambda: session.sample(PROMPTS)):
            with pytest.raises(UserError, match="call optim_step before"):
                verb()
        session.optim_step()
        with pytest.raises(UserError, match="call publish before"):
            session.sample(PROMPTS)
        session.publish()
        fresh = [sample for group in session.sample(PROMPTS, n=2) for sample in group]
        must_be_of_the_weights(session, fresh)
        # The ranks have the devices now. The engines get the same weights again.
        again = [sample for group in session.sample(PROMPTS, n=2) for sample in group]
        must_be_of_the_weights(session, again)
        assert {span.version for one in again for span in one.weight_spans} == {session.version}


def test_gradients_can_be_discarded_and_a_state_loaded_without_moments(session):
    """Adam's first step after a load without moments is that of a new optimizer."""
    data = as_data(session.sample(PROMPTS, n=2))
    sequences = [one.tokens for one in data]

    def after_step(lr: float) -> np.ndarray:
        session.forward_backward(data, "cross_entropy")
        session.optim_step(AdamOptions(lr=lr, clip_grad=0.0))
        return np.concatenate(session.log_probs(sequences))

    session.forward_backward(data, "cross_entropy")
    session.discard_gradients()
    with pytest.raises(UserError, match="call forward_backward before"):
        session.optim_step()
    after_step(0.01)
    saved, with_moments = session.save(), after_step(0.01)
    session.load(saved)
    assert np.abs(after_step(0.01) - with_moments).max() < TOLERANCE
    session.load(saved, moments=False)
    anew = after_step(0.01)
    assert np.abs(anew - with_moments).max() > 1e-4
    session.load(saved, moments=False)
    assert np.abs(after_step(0.01) - anew).max() < TOLERANCE
    # Clipping scales the gradient, which Adam's first step does not depend on, but its second one does.
    session.load(saved)
    session.forward_backward(data, "cross_entropy")
    assert session.optim_step(AdamOptions(lr=0.01, clip_grad=0.01)).grad_norm > 0.01
    assert np.abs(np.concatenate(session.log_probs(sequences)) - with_moments).max() > 1e-4


def test_a_stop_string_of_one_call(session):
    """The configuration has none, so the engine must have been started with a tokenizer all the same."""
    samples = [one for group in session.sample(PROMPTS, n=8, max_tokens=12, stop=["1", "2"]) for one in group]
    ended = [one for one in samples if one.finish_reason == "stop"]
    assert any(one.response_text[-1] in "12" for one in ended)
    assert not any(set(one.response_text[:-1]) & {"1", "2"} for one in samples)
