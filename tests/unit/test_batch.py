"""Batches of flat tokens, and a weight for each of them."""

import pickle
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_megatron.batch.arrays import Here, RoutingParts, reading_forbidden
from grpo_megatron.batch.sample import Sample, WeightSpan
from grpo_megatron.batch.sequence_weights import sequence_weights
from grpo_megatron.batch.train_batch import TrainBatch, fetched_batches
from grpo_megatron.config.load import read_config
from grpo_megatron.megatron.mini_batches import MiniBatches
from tests.coefficients import token_weights
from tests.models import random_batch, random_samples
from tests.streams import selected


def sample(prompt, response, mask=None, group=0, trajectory=0):
    return Sample.of(
        group_id=group,
        trajectory_id=trajectory,
        prompt_ids=np.array(prompt, np.int32),
        response_ids=np.array(response, np.int32),
        loss_mask=np.array(mask if mask is not None else [True] * len(response)),
        rollout_logprobs=-np.arange(1, len(response) + 1, dtype=np.float32),
        finish_reason="stop",
        reward=1.0,
    )


def test_arrays_sit_at_the_position_that_predicts():
    batch = TrainBatch.from_samples([sample([7, 8], [9, 10, 2]), sample([5], [6, 2], [True, False])])
    assert batch.tokens.tolist() == [7, 8, 9, 10, 2, 5, 6, 2]
    assert batch.target.tolist() == [8, 9, 10, 2, 0, 6, 2, 0]
    assert batch.loss_mask.tolist() == [False, True, True, True, False, True, False, False]
    assert batch.rollout_logp.tolist() == [0, -1, -2, -3, 0, -1, -2, 0]
    assert batch.cu_seqlens.tolist() == [0, 5, 8]


def test_the_routing_of_the_samples_follows_their_tokens():
    routing = [np.full((tokens, 2, 1), number, np.uint8) for number, tokens in ((1, 5), (2, 3))]
    samples = [sample([7, 8], [9, 10, 2]), sample([5], [6, 2])]
    batch = TrainBatch.from_samples([s.with_arrays(routing=r) for s, r in zip(samples, routing, strict=True)])
    assert batch.routing[:, 0, 0].tolist() == [1] * 5 + [2] * 3
    assert selected(batch, [1]).routing.tolist() == routing[1].tolist()
    with pytest.raises(ValueError, match="1 of 2 samples carry the engine's routing"):
        TrainBatch.from_samples([samples[0].with_arrays(routing=routing[0]), samples[1]])


class Fetched(Here):
    """Handle that counts how often its value is read."""

    reads = 0

    @classmethod
    def get(cls, handles):
        cls.reads += len(handles)
        return super().get(handles)


def test_a_rank_fetches_the_routing_of_its_stage_only():
    """Two chunks of the model are on each of two pipeline stages, so their layers alternate."""
    stages = ((0, 2), (1, 3))
    random = np.random.default_rng(0)
    whole = [random.integers(0, 9, (tokens, 4, 2), np.uint8) for tokens in (5, 3, 4)]
    samples = [sample([7, 8], [9, 10, 2]), sample([5], [6, 2]), sample([5, 6], [6, 2])]

    def divided(one, routing):
        parts = RoutingParts(stages, tuple(Fetched(routing[:, list(layers)]) for layers in stages))
        return one.with_arrays(routing=parts)

    # The last sample is of a recording, which has the routing of all layers.
    given = [*map(divided, samples[:2], whole), samples[2].with_arrays(routing=whole[2])]
    first, _ = fetched_batches([given[:2], given[2:]], stage=1)
    assert Fetched.reads == 2
    assert np.array_equal(first.routing, np.concatenate(whole[:2])[:, [1, 3]])
    assert np.array_equal(TrainBatch.from_samples(given).routing, np.concatenate(whole))


def test_a_pickled_sample_is_the_same():
    """Values that are the defaults are left out, however many there are."""
    bare = sample([7], [8, 9])
    full = replace(
        bare.with_texts("text", "scored"),
        weight_spans=(WeightSpan(1, 0, 2),),
        reward_components={"a": 1.0},
        turns=2,
        reward_failed=True,
    )
    for one in (bare, replace(bare, turns=3), replace(bare, reward=None), full, full.for_ranks()):
        again = pickle.loads(pickle.dumps(one))
        assert replace(again, handle=None) == replace(one, handle=None)
        assert np.array_equal(again.arrays.response_ids, one.arrays.response_ids)


def test_select_keeps_each_sequence_whole():
    batch = random_batch(count=6)
    part = selected(batch, [4, 1])
    for new, old in enumerate([4, 1]):
        a, b = part.cu_seqlens[new : new + 2], batch.cu_seqlens[old : old + 2]
        for name in ("tokens", "target", "loss_mask", "rollout_logp"):
            assert np.array_equal(getattr(part, name)[a[0] : a[1]], getattr(batch, name)[b[0] : b[1]])
    assert part.group_id.tolist() == batch.group_id[[4, 1]].tolist()


def test_an_empty_response_is_refused():
    with pytest.raises(ValueError, match="the response has no token"):
        sample([1], [])


def test_misaligned_logprobs_are_refused():
    with pytest.raises(ValueError, match="2 log-probs"):
        Sample.of(0, 3, np.array([1]), np.array([1, 2, 3]), np.ones(3, bool), np.zeros(2, np.float32), "stop")


# Two groups. Group 0: trajectories of 3 and 1 trained tokens; group 1: 2 tokens, and one fully masked.
@pytest.fixture
def batch():
    return TrainBatch.from_samples(
        [
            sample([1], [2, 3, 4], group=0, trajectory=0),
            sample([1], [2], group=0, trajectory=1),
            sample([1], [2, 3], group=1, trajectory=2),
            sample([1], [2, 3], [False, False], group=1, trajectory=3),
        ]
    )


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", [1 / 6] * 6),
        ("seq-mean-token-sum", [1 / 3] * 6),
        ("seq-mean-token-mean", [1 / 9] * 3 + [1 / 3] + [1 / 6] * 2),
        ("seq-mean-token-sum-norm", [1 / 30] * 6),
        ("group-sum", [1 / 6] * 3 + [1 / 2] + [1 / 4] * 2),
    ],
)
def test_token_weights_by_hand(batch, mode, expected):
    weights = token_weights(batch, mode, max_response_length=10)
    np.testing.assert_allclose(weights[batch.loss_mask], expected, rtol=1e-6)
    assert (weights[~batch.loss_mask] == 0).all()


def test_weights_are_float32(batch):
    assert token_weights(batch, "token-mean", 4).dtype == np.float32
    batch.set(loss_mask=np.zeros(batch.num_tokens, bool))
    assert token_weights(batch, "token-mean", 4).dtype == np.float32


def test_an_array_is_set_if_it_has_an_entry_for_each_token(batch):
    advantage = np.arange(batch.num_tokens, dtype=np.float32)
    batch.set(advantage=advantage, ref_logp=None)
    assert batch.advantage is advantage
    assert batch.ref_logp is None
    with pytest.raises(ValueError, match=f"advantage has 2 entries for {batch.num_tokens} tokens"):
        batch.set(advantage=advantage[:2])


def test_a_trajectory_in_two_sequences_counts_once():
    batch = TrainBatch.from_samples(
        [sample([1], [2, 3], trajectory=5), sample([1], [2], trajectory=5), sample([1], [2], trajectory=6)]
    )
    weights = token_weights(batch, "seq-mean-token-mean", 10)
    np.testing.assert_allclose(weights[batch.loss_mask], [1 / 6] * 3 + [1 / 2], rtol=1e-6)


def test_all_masked_gives_zero_weights(batch):
    batch.loss_mask[:] = False
    assert not token_weights(batch, "token-mean", 10).any()


def test_unknown_mode_is_refused(batch):
    with pytest.raises(ValueError, match="token-mean"):
        sequence_weights(batch.table, np.ones(4), "mean", 10)


def test_random_samples_have_all_their_tokens():
    samples = random_samples(count=5)
    batch = TrainBatch.from_samples(samples)
    assert batch.loss_mask.sum() == sum(s.arrays.loss_mask.sum() for s in samples)
    for s, start, end in zip(samples, batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        mask = batch.loss_mask[start:end]
        assert batch.target[start:end][mask].tolist() == s.arrays.response_ids[s.arrays.loss_mask].tolist()
        np.testing.assert_array_equal(
            batch.rollout_logp[start:end][mask], s.arrays.rollout_logprobs[s.arrays.loss_mask]
        )


def test_the_driver_of_a_run_reads_no_arrays():
    sample = random_samples()[0]
    with reading_forbidden(), pytest.raises(RuntimeError, match="must not read the arrays"):
        sample.arrays  # noqa: B018
    assert len(sample.arrays.response_ids) == sample.num_response
    with pytest.raises(AttributeError, match=r"`arrays\.response_ids` reads them, except in the driver"):
        sample.response_ids  # noqa: B018


def aged(*spans):
    return replace(sample([7, 8], [9, 10, 5, 2]), weight_spans=tuple(WeightSpan(*span) for span in spans))


def test_each_token_has_the_age_of_the_weights_that_sampled_it():
    """A token that the environment wrote is of no version; it is not trained on."""
    samples = [aged((3, 0, 1), (5, 2, 4)), aged((6, 0, 4))]
    assert TrainBatch.from_samples(samples, version=6).age.tolist() == [0, 3, 0, 1, 1, 0] + [0] * 6
    assert TrainBatch.from_samples(samples).age is None


@pytest.mark.parametrize(
    ("on_update", "ages"), [("continue", [3, 3, 1, 1]), ("keep", [3, 3, 1, 1])], ids=["continue", "keep"]
)
def test_ranks_know_the_age_of_tokens(on_update, ages):
    """An engine that keeps its cache may use keys and values of older weights for any token."""
    changes = ["model.path=m", "data.train=d", "train.old_logprobs=rollout", f"rollout.on_update={on_update}"]
    rank = SimpleNamespace(pp_rank=0, last_stage=False, reports=False)
    kept = MiniBatches(None, read_config(None, changes), rank)
    shipped = [sample.for_ranks(with_spans=True) for sample in (aged((3, 0, 2), (5, 2, 4)), aged((6, 0, 4)))]
    kept.measure({(1, 0): [shipped]}, 6)
    (batch,) = kept._kept[1, 0].samples
    assert batch.age[1:5].tolist() == ages
    assert batch.age[7:11].tolist() == [int(on_update == "keep")] * 4
    kept.measure({(1, 0): [[sample.for_ranks() for sample in shipped]]})
    assert kept._kept[1, 0].samples[0].age is None
