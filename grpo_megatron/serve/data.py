"""Reads the training data of a request, and writes its result: sequences, losses and log-probs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from grpo_megatron.algorithm.losses import LossInputs, PolicyLoss
from grpo_megatron.batch.datum import Datum
from grpo_megatron.config.algorithm import AlgorithmConfig
from grpo_megatron.errors import UserError
from grpo_megatron.serve.protobuf import FLOAT32, INT64, ForwardBackwardOutput

_DTYPES = {FLOAT32: np.float32, INT64: np.int64}
# Bounds of the policy ratio in the losses ppo and cispo.
_BOUNDS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
# {loss of the Tinker API: surrogate objective}. cross_entropy is -weight · logp, as reinforce with the weight
# in place of the advantage.
_SURROGATES = {
    "cross_entropy": "reinforce",
    "importance_sampling": "importance_sampling",
    "ppo": "clip",
    "cispo": "cispo",
}


@dataclass(frozen=True)
class TrainingData:
    """The data of a request to forward_backward.

    data: the sequences. Every token that its predecessor predicts has weight 1, so that all log-probs are
        computed. What the loss weights a token with is in `advantage`
    objective: the loss of each token
    """

    data: list[Datum]
    objective: PolicyLoss

    @classmethod
    def of(cls, request: Any) -> "TrainingData":
        """Read a ForwardBackwardRequest. Raises UserError for a loss or data that cannot be used."""
        settings = {
            one.key: one.value.text if one.value.text else one.value.number for one in request.loss_fn_config
        }
        objective = _objective(request.loss_fn, settings)
        data = [_datum(one, request.loss_fn, f"datum {i}") for i, one in enumerate(request.data)]
        if not data:
            raise UserError("forward_backward needs at least one datum")
        return cls(data, objective)

    def output(self, logprobs: Sequence[np.ndarray], loss: float) -> bytes:
        """Return the result as bytes of a ForwardBackwardOutput.

        logprobs: float32 [n] for each Datum of n tokens. The first token's value is left out. The result has
            0 where the target is not the next token of the input.
        loss: sum of the loss over all tokens.
        """
        message = ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
        message.metrics.add(key="loss:sum", value=loss)
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(self.data))
        field = record.fields.add(key="logprobs")
        pairs = zip(self.data, logprobs, strict=True)
        values = [np.where(datum.weight > 0, one, 0)[1:].astype(np.float32) for datum, one in pairs]
        ends = np.cumsum([0, *map(len, values)], dtype=np.int64) * np.dtype(np.float32).itemsize
        field.value.data, field.value.offsets = np.concatenate(values).tobytes(), ends.tobytes()
        field.value.dtype = FLOAT32
        return message.SerializeToString()

    def loss_of(self, logprobs: Sequence[np.ndarray]) -> float:
        """Return the sum of the loss for given log-probs, float32 [n] for each Datum of n tokens."""
        logp, mask = torch.tensor(np.concatenate(logprobs)), np.concatenate([one.weight for one in self.data])
        advantage = torch.tensor(np.concatenate([one.advantage for one in self.data]))
        known = self.data[0].logprobs is not None
        old = torch.tensor(np.concatenate([one.logprobs for one in self.data])) if known else logp
        inputs = LossInputs(torch.tensor(mask > 0), advantage, old, old, old, sequence_sum=lambda one: one)
        return float(self.objective(logp, torch.zeros_like(logp), inputs)[0].double().sum())


def _objective(loss: str, settings: dict[str, float | str]) -> PolicyLoss:
    """Return a loss of the Tinker API, by its name and its settings (loss_fn_config)."""
    if loss not in _SURROGATES:
        raise UserError(f"the loss {loss!r} is not supported; choose one of {', '.join(_SURROGATES)}")
    bounds = _BOUNDS if loss in ("ppo", "cispo") else {}
    for name, value in settings.items():
        if name not in bounds or isinstance(value, str):
            raise UserError(
                f"the loss {loss} has no setting {name}={value!r}; it has "
                f"{', '.join(bounds) if bounds else 'none'}"
            )
    low, high = (bounds | settings).values() if bounds else (1.0, 1.0)
    if not 0 <= low <= 1 <= high:
        raise UserError(
            f"clip_low_threshold={low} and clip_high_threshold={high} must be on both sides of 1, because "
            "they are bounds of the policy ratio"
        )
    limits = {"clip_ratio_low": 1 - low, "clip_ratio_high": high - 1}
    return PolicyLoss(AlgorithmConfig(surrogate=_SURROGATES[loss], **limits))


def _datum(message: Any, loss: str, where: str) -> Datum:
    """Return a sequence with what its tokens are predicted from, and with the values of the loss.

    message: its model_input has N tokens. Value i of each of its tensors is of the token after token i.
    where: name of the sequence in error messages.
    """
    if not all(chunk.HasField("encoded_text") for chunk in message.model_input):
        raise UserError(f"{where} has an input other than tokens, such as an image, which is not supported")
    parts = [np.frombuffer(chunk.encoded_text.tokens, np.int32) for chunk in message.model_input]
    read = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    tensors = {one.key: one.value for one in message.loss_fn_inputs}

    def values(name: str, default: Callable[..., np.ndarray] | None = None) -> np.ndarray:
        if name not in tensors and default:
            return default(len(read), np.float32)
        return _array(tensors.get(name), len(read), f"{where}: {name}")

    targets = values("target_tokens").astype(np.int32)
    weight = values("weights", np.ones) if loss == "cross_entropy" else values("advantages")
    logprobs = None if loss == "cross_entropy" else values("logprobs")
    tokens = np.append(read, targets[-1])
    predicted = tokens[1:] == targets
    if (weight[~predicted] != 0).any():
        index = int(np.flatnonzero((weight != 0) & ~predicted)[0])
        raise UserError(
            f"{where}: target_tokens[{index}] is {targets[index]}, but the next token of the input is "
            f"{tokens[index + 1]}; the two may differ only where the loss has the weight 0"
        )
    return Datum(
        tokens=tokens,
        weight=_after_first(predicted),
        advantage=_after_first(np.where(predicted, weight, 0)),
        logprobs=None if logprobs is None else _after_first(logprobs),
    )


def _array(tensor: Any, length: int, name: str) -> np.ndarray:
    if tensor is None:
        raise UserError(f"{name} is missing, but the loss needs it")
    if tensor.sparse_csr or tensor.dtype not in _DTYPES:
        raise UserError(f"{name} must be a dense tensor of float32 or int64")
    array = np.frombuffer(tensor.dense, _DTYPES[tensor.dtype])
    if len(tensor.shape) > 1 or len(array) != length or not length:
        raise UserError(
            f"{name} must have one value for each of the {length} input tokens, but has the shape "
            f"{list(tensor.shape) or [len(array)]}"
        )
    return array


def _after_first(values: np.ndarray) -> np.ndarray:
    """Return values of the tokens after the first as float32 [n], with 0 for the first token."""
    return np.append(np.float32(0), values).astype(np.float32)
