"""The losses of `grpo-megatron serve`: those of the published formulas, with the published defaults."""

import numpy as np
import pytest
import torch

from grpo_megatron.errors import UserError
from grpo_megatron.serve.data import TrainingData
from grpo_megatron.serve.protobuf import FLOAT32, INT64, ForwardBackwardRequest


def request_of(loss: str, weight, sampling, mask=None, **settings) -> ForwardBackwardRequest:
    """Return a request with one sequence of four trained tokens."""
    request = ForwardBackwardRequest(loss_fn=loss)
    for key, value in settings.items():
        request.loss_fn_config.add(key=key).value.number = value
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([1, 2, 3, 4], np.int32).tobytes()
    tensors = {"target_tokens": np.array([2, 3, 4, 5])}
    if loss == "cross_entropy":
        tensors["weights"] = weight
    else:
        tensors |= {"advantages": weight, "logprobs": sampling}
    if mask is not None:
        tensors["sequence_ratio_mask"] = mask
    for key, values in tensors.items():
        tensor = datum.loss_fn_inputs.add(key=key).value
        tensor.dense, tensor.dtype = values.tobytes(), INT64 if key == "target_tokens" else FLOAT32
    return request


@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling", "ppo", "cispo", "gspo", "dro"])
def test_losses_are_those_of_the_published_formulas(loss):
    """Compare with the formulas of Tinker's documentation, written once more, and their gradients."""
    rng = np.random.default_rng(5)
    logp, sampling, weight = (rng.normal(size=4).astype(np.float32) for _ in range(3))
    mask = np.array([0, 1, 1, 1], np.float32) if loss == "gspo" else None
    weight *= 1 if mask is None else mask
    settings = {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1}
    settings = {"dro": {"beta": 0.3}, "ppo": settings, "cispo": settings, "gspo": settings}.get(loss, {})
    data = TrainingData.of(request_of(loss, weight, sampling, mask, **settings))

    def published(logp: torch.Tensor) -> torch.Tensor:
        log_ratio = logp - torch.tensor(sampling)
        if loss == "gspo":
            log_ratio = log_ratio.detach()[1:].mean() + logp - logp.detach()
        a, ratio, clipped = torch.tensor(weight), log_ratio.exp(), log_ratio.exp().clamp(0.7, 1.1)
        return {
            "cross_entropy": -logp * a,
            "importance_sampling": -ratio * a,
            "ppo": -torch.minimum(ratio * a, clipped * a),
            "gspo": -torch.minimum(ratio * a, clipped * a),
            "cispo": -clipped.detach() * logp * a,
            "dro": -(logp * a - 0.5 * 0.3 * log_ratio**2),
        }[loss].sum()

    first = torch.zeros(1)  # the log-prob of the first token, which nothing predicts
    given = torch.tensor(logp, requires_grad=True)
    expected = published(given)
    expected.backward()
    whole = np.append(np.float32(0), logp)
    assert data.loss_of([whole]) == pytest.approx(expected.item(), rel=1e-5)
    own = torch.tensor(logp, requires_grad=True)
    data.loss_tensor(data.data[0], torch.cat([first, own])).backward()
    assert own.grad.tolist() == pytest.approx(given.grad.tolist(), rel=1e-5)
    with pytest.raises(UserError, match="has no setting"):
        TrainingData.of(request_of(loss, weight, sampling, mask, other=1, **settings))


def test_cispo_has_no_lower_bound_unless_it_is_given():
    """Its defaults were those of ppo, but Tinker's are 0 and 4."""
    ratio = np.array([0.1, 0.9, 3.0, 9.0], np.float32)
    request = request_of("cispo", np.ones(4, np.float32), -np.log(ratio) - 1)
    logp = np.append(np.float32(0), -np.ones(4, np.float32))
    assert TrainingData.of(request).loss_of([logp]) == pytest.approx(0.1 + 0.9 + 3 + 4, rel=1e-5)
