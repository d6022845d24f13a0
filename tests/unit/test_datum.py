"""Sequences that a user's own loop trains on, and the losses that it may choose."""

import numpy as np
import pytest
import torch

from grpo_megatron.algorithm.losses import CrossEntropyLoss, LossInputs, PolicyLoss
from grpo_megatron.algorithm.named_loss import OwnLoss, named_loss
from grpo_megatron.batch.datum import Datum, datum_batch
from grpo_megatron.config.algorithm import AlgorithmConfig
from grpo_megatron.errors import UserError
from tests.models import random_samples


def test_values_of_a_token_stand_where_it_is_predicted():
    samples = random_samples(count=4)
    data = [Datum.of(sample, advantage=2.0, weight=0.5) for sample in samples]
    batch = datum_batch(data)
    start = 0
    for sample, datum in zip(samples, data, strict=True):
        arrays, end = sample.arrays, start + sample.num_tokens
        predicts = slice(start + sample.num_prompt - 1, end - 1)
        assert (batch.target[predicts] == arrays.response_ids).all()
        assert (batch.loss_mask[predicts] == arrays.loss_mask).all()
        assert (batch.weight[predicts] == 0.5 * arrays.loss_mask).all()
        assert (batch.advantage[predicts] == 2.0 * arrays.loss_mask).all()
        assert (batch.old_logp[predicts] == arrays.rollout_logprobs).all()
        assert batch.weight[start:end].sum() == datum.weight.sum()
        start = end


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens": [5], "weight": [1.0]}, "at least two tokens, but has 1"),
        ({"tokens": [5, 6], "weight": [1.0]}, r"Datum.weight must have a value for each of the 2 tokens"),
        ({"tokens": [5, 6], "weight": [0, 1], "logprobs": [0, float("nan")]}, "Datum.logprobs must be finite"),
    ],
)
def test_wrong_arrays_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        Datum(**{name: np.array(values) for name, values in fields.items()})


def inputs_of(count: int) -> LossInputs:
    given = torch.linspace(-2, -0.1, count)
    return LossInputs(
        mask=torch.tensor([True] * (count - 1) + [False]),
        advantage=torch.linspace(-1, 1, count),
        rollout_logp=given,
        ref_logp=given,
        old_logp=given,
        sequence_sum=lambda values: values.sum().expand(count),
    )


def test_losses_by_name():
    algorithm = AlgorithmConfig(use_kl_loss=True, clip_ratio_low=0.1, clip_ratio_high=0.1)
    inputs, logp = inputs_of(5), torch.full((5,), -0.7)
    assert isinstance(named_loss("cross_entropy", algorithm), CrossEntropyLoss)
    assert named_loss("policy", algorithm) == PolicyLoss(algorithm)
    clipped, _ = named_loss("clip", algorithm)(logp, torch.zeros(5), inputs)
    ratio = (logp - inputs.old_logp).exp()
    limited = torch.minimum(ratio * inputs.advantage, ratio.clamp(0.9, 1.1) * inputs.advantage)
    assert torch.allclose(clipped, torch.where(inputs.mask, -limited, 0.0))
    own, metrics = named_loss(lambda logp, entropy, inputs: -logp, algorithm)(logp, logp, inputs)
    assert own.tolist() == pytest.approx([0.7] * 4 + [0.0])
    assert metrics == {}
    assert isinstance(named_loss(OwnLoss(max), algorithm), OwnLoss)
    with pytest.raises(UserError, match="clipped"):
        named_loss("clipped", algorithm)
