"""Reads the training data of a request, and writes its result: sequences, losses and log-probs."""

from collections.abc import Sequence
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


def _bounds(low: float, high: float) -> dict[str, float]:
    """Return the settings of a loss that clips the policy ratio, with these defaults."""
    return {"clip_low_threshold": low, "clip_high_threshold": high}


# {loss of the Tinker API: (surrogate objective, settings with their defaults)}. cross_entropy is
# -weight · logp, as reinforce with the weight in place of the advantage. The bounds of gspo are those of its
# paper (arXiv:2507.18071), and the other ones Tinker's. NaN: the setting has no default.
_LOSSES: dict[str, tuple[str, dict[str, float]]] = {
    "cross_entropy": ("reinforce", {}),
    "importance_sampling": ("importance_sampling", {}),
    "ppo": ("clip", _bounds(0.8, 1.2)),
    "cispo": ("cispo", _bounds(0.0, 4.0)),
    "gspo": ("clip", _bounds(1 - 3e-4, 1 + 4e-4)),
    "dro": ("reinforce", {"beta": np.nan}),
}
# Tensors of a datum that the losses use, and those of losses that differ.
_TENSORS = ("target_tokens", "advantages", "logprobs")
_OTHER_TENSORS = {
    "cross_entropy": ("target_tokens", "weights"),
    "gspo": (*_TENSORS, "sequence_ratio_mask"),
}


@dataclass(frozen=True)
class TrainingData:
    """The data of a request to forward_backward.

    data: the sequences. Every token that its predecessor predicts has weight 1, so that all log-probs are
        computed; for gspo, only those of the mask. What the loss weights a token with is in `advantage`
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
        pairs = zip(self.data, map(torch.tensor, logprobs), strict=True)
        return float(sum(self.loss_tensor(datum, logp).double() for datum, logp in pairs))

    def loss_tensor(self, datum: Datum, logp: torch.Tensor) -> torch.Tensor:
        """Return the sum of the loss over a Datum's tokens, for their log-probs [n]."""
        advantage, mask = torch.tensor(datum.advantage), torch.tensor(datum.weight > 0)
        old = logp.detach() if datum.logprobs is None else torch.tensor(datum.logprobs)
        inputs = LossInputs(mask, advantage, old, old, old, lambda values: values.sum().expand_as(values))
        return self.objective(logp, torch.zeros_like(logp), inputs)[0].sum()


def _objective(loss: str, given: dict[str, float | str]) -> PolicyLoss:
    """Return a loss of the Tinker API, by its name and its settings (loss_fn_config)."""
    if loss not in _LOSSES:
        raise UserError(f"the loss {loss!r} is not supported; choose one of {', '.join(_LOSSES)}")
    surrogate, settings = _LOSSES[loss]
    for name, value in given.items():
        if name not in settings or isinstance(value, str):
            has = ", ".join(settings) or "none"
            raise UserError(f"the loss {loss} has no setting {name}={value!r}; it has {has}")
    settings = settings | given
    low, high = settings.get("clip_low_threshold", 1.0), settings.get("clip_high_threshold", 1.0)
    if not 0 <= low <= 1 <= high:
        raise UserError(
            f"clip_low_threshold={low} and clip_high_threshold={high} must be on both sides of 1, because "
            "they are bounds of the policy ratio"
        )
    if not 0 <= settings.get("beta", 0) < np.inf:
        raise UserError(f"the loss {loss} needs loss_fn_config with beta, which is at least 0")
    options = {"clip_ratio_low": 1 - low, "clip_ratio_high": high - 1}
    if loss == "gspo":
        options["ratio_level"] = "sequence"
    if loss == "dro":
        # Its penalty, beta/2 · (logp - logprobs)², is that of a KL to the policy that sampled.
        options |= {"use_kl_loss": True, "kl_loss_type": "k2", "kl_loss_coef": settings["beta"]}
    return PolicyLoss(AlgorithmConfig(surrogate=surrogate, **options))


def _datum(message: Any, loss: str, where: str) -> Datum:
    """Return a sequence with what its tokens are predicted from, and with the values of the loss.

    message: its model_input has N tokens. Value i of each of its tensors is of the token after token i.
    where: name of the sequence in error messages.
    """
    if not all(chunk.HasField("encoded_text") for chunk in message.model_input):
        raise UserError(f"{where} has an input other than tokens, such as an image, which is not supported")
    read = _numbers(b"".join(chunk.encoded_text.tokens for chunk in message.model_input), np.int32, where)
    tensors = {one.key: one.value for one in message.loss_fn_inputs}
    names = _OTHER_TENSORS.get(loss, _TENSORS)
    if set(names) - {"weights"} != tensors.keys() - {"weights"}.intersection(names):
        has = ", ".join(sorted(tensors)) or "none"
        raise UserError(f"{where}: the loss {loss} takes the tensors {', '.join(names)}; the datum has {has}")
    values = {name: _array(tensor, len(read), f"{where}: {name}") for name, tensor in tensors.items()}
    targets = values["target_tokens"].astype(np.int32)
    tokens = np.append(read, targets[-1])
    weight = values.get("advantages", values.get("weights", np.ones(len(read), np.float32)))
    counts = (weight != 0) | (loss == "dro")  # the penalty of dro counts every token
    trained = tokens[1:] == targets
    if loss == "gspo":
        mask = values["sequence_ratio_mask"] != 0
        if (counts & ~mask).any():
            raise UserError(f"{where}: advantages must be 0 where sequence_ratio_mask is 0")
        counts, trained = mask, trained & mask
    if (counts & ~trained).any():
        index = int(np.flatnonzero(counts & ~trained)[0])
        raise UserError(
            f"{where}: target_tokens[{index}] is {targets[index]}, but the next token of the input is "
            f"{tokens[index + 1]}; the two may differ only where the loss has the weight 0"
        )
    logprobs = _after_first(values["logprobs"]) if "logprobs" in values else None
    return Datum(
        tokens=tokens,
        weight=_after_first(trained),
        advantage=_after_first(np.where(trained, weight, 0)),
        logprobs=logprobs,
        reference=logprobs,
    )


def _array(tensor: Any, length: int, name: str) -> np.ndarray:
    if tensor.sparse_csr or tensor.dtype not in _DTYPES:
        raise UserError(f"{name} must be a dense tensor of float32 or int64")
    array = _numbers(tensor.dense, _DTYPES[tensor.dtype], name)
    if len(tensor.shape) > 1 or len(array) != length or not length:
        raise UserError(
            f"{name} must have one value for each of the {length} input tokens, but has the shape "
            f"{list(tensor.shape) or [len(array)]}"
        )
    if not np.isfinite(array).all():
        raise UserError(f"{name} has a value that is NaN or infinite")
    return array


def _numbers(raw: bytes, dtype: type, name: str) -> np.ndarray:
    if len(raw) % np.dtype(dtype).itemsize:
        raise UserError(f"{name} has {len(raw)} bytes, which are no whole number of {dtype.__name__} values")
    return np.frombuffer(raw, dtype)


def _after_first(values: np.ndarray) -> np.ndarray:
    """Return values of the tokens after the first as float32 [n], with 0 for the first token."""
    return np.append(np.float32(0), values).astype(np.float32)
