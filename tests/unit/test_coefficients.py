from dataclasses import replace

import numpy as np
import pytest

from grpo_megatron.algorithm.advantages import advantage_estimator
from grpo_megatron.algorithm.columns import needs_columns
from grpo_megatron.algorithm.kl import KLController
from grpo_megatron.batch.sample import Sample
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.config.schema import AlgorithmConfig, Config
from tests.coefficients import set_coefficients


def samples(rewards, lengths, first_group=0):
    """Return groups of two, with prompts of one token."""
    made = []
    for i, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
        ids = np.arange(1, length + 1, dtype=np.int32)
        masks = np.ones(length, bool), np.zeros(length, np.float32)
        made.append(
            Sample.of(first_group + i // 2, 10 * first_group + i, ids[:1], ids, *masks, "stop", reward=reward)
        )
    return made


@pytest.fixture
def batches():
    """Return two optimizer steps: rewards 1 and 0 with 1 and 2 tokens, then rewards 0 and 4 with 1 and 1."""
    return [
        TrainBatch.from_samples(samples([1.0, 0.0], [1, 2])),
        TrainBatch.from_samples(samples([0.0, 4.0], [1, 1], first_group=5)),
    ]


def advantages(batches, controller=None, **options):
    config = replace(Config(), algorithm=AlgorithmConfig(**options))
    metrics = set_coefficients(batches, config, None, controller or KLController(0.0))
    assert all(not batch.advantage[~batch.loss_mask].any() for batch in batches)
    return [batch.advantage[batch.loss_mask].tolist() for batch in batches], metrics


def test_each_mini_batch_gets_its_own(batches):
    found, metrics = advantages(batches, norm_adv_by_std_in_grpo=False)
    assert found == [[0.5, -0.5, -0.5], [-2, 2]]
    assert metrics == {}


def test_whitening_is_over_the_whole_step(batches):
    found, _ = advantages(batches, norm_adv_by_std_in_grpo=False, adv_whiten=True)
    values = np.array([0.5, -0.5, -0.5, -2, 2])
    expected = (values - values.mean()) / values.std(ddof=1)
    np.testing.assert_allclose(np.concatenate(found), expected, rtol=1e-6)


def test_valid_token_scale_counts_the_optimizer_step(batches):
    found, _ = advantages(batches, norm_adv_by_std_in_grpo=False, use_valid_token_scale=True)
    np.testing.assert_allclose(found[0], np.array([0.5, -0.5, -0.5]) / 3, rtol=1e-6)
    np.testing.assert_allclose(found[1], [-1, 1])


def test_valid_token_scale_with_one_trained_token_and_with_none(batches):
    batches[0].loss_mask[np.flatnonzero(batches[0].loss_mask)[1:]] = False
    batches[1].loss_mask[:] = False
    further = TrainBatch.from_samples(samples([0.0, 4.0], [1, 1], first_group=8))
    given = [*batches, further]
    plain, _ = advantages(given, adv_estimator="reinforce_plus_plus")
    scaled, _ = advantages(given, adv_estimator="reinforce_plus_plus", use_valid_token_scale=True)
    assert plain[0] != [0.0]
    assert scaled[0] == plain[0]
    assert scaled[1] == []
    np.testing.assert_allclose(scaled[2], np.array(plain[2]) / 2)


def test_the_kl_in_the_reward_by_hand(batches):
    """k1 is 0.5 on every token, so that rewards are lower by 0.1 per token with the coefficient 0.2."""
    for batch in batches:
        batch.old_logp = np.where(batch.loss_mask, -1.0, 0).astype(np.float32)
        batch.ref_logp = np.where(batch.loss_mask, -1.5, 7).astype(np.float32)
    controller = KLController(0.2, adaptive=True, target=0.5 / 1.1, horizon=40)
    options = {"norm_adv_by_std_in_grpo": False, "use_kl_in_reward": True, "kl_penalty": "k1"}
    found, metrics = advantages(batches, controller, **options)
    np.testing.assert_allclose(np.concatenate(found), [0.55, -0.55, -0.55, -2, 2], rtol=1e-6)
    assert metrics["actor/kl_in_reward"].result() == pytest.approx(0.5)
    assert metrics["actor/kl_coef"].result() == 0.2
    assert controller.coef == pytest.approx(0.2 * (1 + 0.1 * 4 / 40))


def test_an_estimator_gets_the_sums_of_the_columns_that_it_asks_for(batches, monkeypatch):
    """The second trajectory of a step has two sequences, one of which is not trained on."""
    seen = {}

    @needs_columns("old_logp", "rollout_logp")
    def curious(inputs, options):
        seen.update({name: inputs.column(name) for name in ("rollout_logp", "old_logp")})
        with pytest.raises(ValueError, match=r'decorate .* with @needs_columns."ref_logp"'):
            inputs.column("ref_logp")
        return inputs.trajectories.score

    monkeypatch.setitem(advantage_estimator._known, "curious", curious)
    for number, batch in enumerate(batches, 1):
        batch.old_logp = np.where(batch.loss_mask, -number, 7.0).astype(np.float32)
        batch.rollout_logp = np.arange(batch.num_tokens, dtype=np.float32)
    batches[1].trajectory_id[:] = batches[0].trajectory_id[1]
    batches[1].reward[:] = batches[0].reward[1]
    batches[1].loss_mask[:2] = False
    found, _ = advantages(batches, adv_estimator="curious")
    assert found == [[1.0, 0.0, 0.0], [0.0]]
    assert seen["old_logp"].tolist() == [-1.0, -4.0]
    positions = [np.flatnonzero(batch.loss_mask) for batch in batches]
    assert seen["rollout_logp"].tolist() == [positions[0][0], positions[0][1:].sum() + positions[1].sum()]


def test_unknown_columns_are_refused():
    with pytest.raises(ValueError, match="unknown columns entropy; known: rollout_logp, old_logp, ref_logp"):
        needs_columns("old_logp", "entropy")
