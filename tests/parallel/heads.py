"""Functions that tests/parallel/test_head.py runs on each rank, and a plain float64 reference to compare
with.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_megatron.megatron.head.logprobs import token_logprobs


@dataclass(frozen=True)
class Problem:
    """One call of the head. The tensors are the same on every rank and in the test."""

    tokens: int = 24
    """Tokens."""
    hidden_size: int = 16
    """Size of a hidden state."""
    vocab_size: int = 61
    """Real words."""
    padded_vocab: int = 64
    """Rows of the weight, of which those beyond the real words are padding."""
    temperature: float = 0.7
    """Divisor of the logits."""
    reference: str = "other"  # other | same | none
    """Hidden states and weight of the reference: "other", "same" or "none"."""
    use: tuple[str, ...] = ("logp", "entropy", "kl")  # outputs that are in the loss
    """Outputs that are in the loss."""
    chunk_tokens: int | None = None
    """Tokens of a tile; None: the usual number."""
    chunk_vocab: int | None = None
    """Words of a tile; None: the usual number."""
    dtype: torch.dtype = torch.float32
    """Dtype of hidden states and weights."""
    exact_logits: bool = False
    """See token_logprobs."""
    trained: tuple[str, ...] = ("hidden", "weight")
    """Tensors that require a gradient."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return hidden, weight, ref_hidden and ref_weight in `dtype`, target, and the loss coefficient of
        each output.
        """
        generator = torch.Generator().manual_seed(7)

        def normal(*shape):
            return torch.randn(*shape, generator=generator)

        found = {"target": torch.randint(self.vocab_size, (self.tokens,), generator=generator)}
        for prefix in ("", "ref_"):
            found[f"{prefix}hidden"] = normal(self.tokens, self.hidden_size).to(self.dtype)
            weight = 0.5 * normal(self.padded_vocab, self.hidden_size)
            weight[self.vocab_size :] = 100.0  # a padded column that took part would dominate everything
            found[f"{prefix}weight"] = weight.to(self.dtype)
        if self.reference == "same":
            found |= {f"ref_{name}": found[name].clone() for name in ("hidden", "weight")}
        return found | {name: normal(self.tokens) for name in ("logp", "entropy", "kl")}


def exact(problem: Problem) -> dict[str, torch.Tensor]:
    """Return values and gradients (of the real words), by whole float64 logits and autograd."""
    tensors = problem.tensors()
    hidden = tensors["hidden"].double().requires_grad_()
    weight = tensors["weight"][: problem.vocab_size].double().requires_grad_()
    log_p = torch.log_softmax(hidden @ weight.t() / problem.temperature, dim=-1)
    values = {
        "logp": log_p.gather(1, tensors["target"][:, None])[:, 0],
        "entropy": -(log_p.exp() * log_p).sum(-1),
    }
    if problem.reference != "none":
        ref_logits = tensors["ref_hidden"].double() @ tensors["ref_weight"][: problem.vocab_size].double().t()
        values["kl"] = (
            log_p.exp() * (log_p - torch.log_softmax(ref_logits / problem.temperature, dim=-1))
        ).sum(-1)
    sum((values[name] * tensors[name]).sum() for name in problem.use).backward()
    return {name: value.detach() for name, value in values.items()} | {
        "hidden": hidden.grad,
        "weight": weight.grad,
    }


class Recorder(TorchDispatchMode):
    """Recorder of the largest tensor that any operation returned, in elements of its storage, and of calls
    by name.
    """

    def __init__(self):
        super().__init__()
        self.largest = 0
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        self.calls[name] = self.calls.get(name, 0) + 1
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out

    @property
    def products(self) -> int:
        return sum(self.calls.get(f"aten::{name}", 0) for name in ("mm", "addmm", "addmm_"))

    @property
    def collectives(self) -> int:
        return sum(count for name, count in self.calls.items() if name.startswith("c10d::"))


def _local(problem: Problem, sequence_parallel: bool) -> dict[str, torch.Tensor]:
    """Return this rank's part of the problem, with gradients required."""
    group = dist.group.WORLD
    tensors = problem.tensors()
    for prefix in ("", "ref_"):
        tensors[f"{prefix}weight"] = tensors[f"{prefix}weight"].chunk(group.size())[group.rank()].clone()
        if sequence_parallel:
            tensors[f"{prefix}hidden"] = tensors[f"{prefix}hidden"].chunk(group.size())[group.rank()].clone()
    for name in problem.trained:
        tensors[name].requires_grad_()
    return tensors


def _call(problem: Problem, tensors: dict, sequence_parallel: bool, **options):
    return token_logprobs(
        tensors["hidden"],
        tensors["weight"],
        tensors["target"],
        problem.temperature,
        problem.vocab_size,
        dist.group.WORLD,
        sequence_parallel,
        reference=None if problem.reference == "none" else (tensors["ref_hidden"], tensors["ref_weight"]),
        chunk_tokens=problem.chunk_tokens,
        chunk_vocab=problem.chunk_vocab,
        exact_logits=problem.exact_logits,
        **options,
    )


def _backward(problem: Problem, tensors: dict, values) -> None:
    sum((getattr(values, name) * tensors[name]).sum() for name in problem.use).backward()


def values_and_gradients(problem: Problem, sequence_parallel: bool) -> dict:
    """Return NumPy float32 by name.

    `hidden` and `weight` are this rank's gradients, absent if there are none.
    """
    tensors = _local(problem, sequence_parallel)
    values = _call(problem, tensors, sequence_parallel)
    assert all(value is None or value.dtype == torch.float32 for value in values)
    _backward(problem, tensors, values)
    found = {name: value for name, value in values._asdict().items() if value is not None}
    found |= {name: tensors[name].grad for name in ("hidden", "weight") if tensors[name].grad is not None}
    assert tensors["ref_hidden"].grad is None
    assert tensors["ref_weight"].grad is None
    return {name: value.detach().float().numpy() for name, value in found.items()}


def of_positions(problem: Problem, sequence_parallel: bool, positions: tuple[int, ...]) -> tuple[dict, dict]:
    """Compare the head for some positions with the head for all tokens and a loss at these positions.

    Returns for both the values at the positions, and the gradients of this rank's hidden states and weight.
    """
    index = torch.tensor(positions)
    results = []
    for options in ({"positions": index}, {}):
        tensors = _local(problem, sequence_parallel)
        values = _call(problem, tensors, sequence_parallel, **options)
        chosen = {name: value if options else value[index] for name, value in values._asdict().items()}
        sum((chosen[name] * tensors[name][index]).sum() for name in problem.use).backward()
        found = chosen | {name: tensors[name].grad for name in ("hidden", "weight")}
        results.append({name: value.detach().float().numpy() for name, value in found.items()})
    return results[0], results[1]


def recorded(problem: Problem, sequence_parallel: bool) -> dict:
    """Return `largest`, `products` and `collectives`, each of the forward and the backward pass."""
    tensors = _local(problem, sequence_parallel)
    with Recorder() as forward:
        values = _call(problem, tensors, sequence_parallel)
    with Recorder() as backward:
        _backward(problem, tensors, values)
    return {
        name: (getattr(forward, name), getattr(backward, name))
        for name in ("largest", "products", "collectives")
    }


def accumulated(problem: Problem, main_dtype: torch.dtype, marked: bool, zero_out: bool) -> dict:
    """Return the gradient added to a main_grad of ones, and what is left in `weight.grad` (None or NumPy).

    marked: the weight has `grad_added_to_main_grad`, like a parameter of Megatron's DDP.
    zero_out: it also has `zero_out_wgrad`, like a tied embedding.
    """
    tensors = _local(problem, sequence_parallel=False)
    weight = tensors["weight"]
    weight.main_grad = torch.ones(weight.shape, dtype=main_dtype)
    if marked:
        weight.grad_added_to_main_grad = False
        weight.zero_out_wgrad = zero_out
    _backward(problem, tensors, _call(problem, tensors, False, accumulate_into_main_grad=True))
    assert not marked or weight.grad_added_to_main_grad
    return {
        "main_grad": weight.main_grad.float().numpy() - 1,
        "grad": None if weight.grad is None else weight.grad.float().numpy(),
    }


def evaluated(problem: Problem) -> bool:
    """Return True if values without gradients equal those with, and have no autograd graph."""
    tensors = _local(problem, sequence_parallel=False)
    with torch.no_grad():
        plain = _call(problem, tensors, False)
    assert all(value.grad_fn is None for value in plain)
    return all(torch.equal(a, b) for a, b in zip(plain, _call(problem, tensors, False), strict=True))


def refusals(problem: Problem) -> list[str]:
    """Return the messages of calls that are refused. A target that no rank has must give NaN."""
    tensors = _local(problem, sequence_parallel=False)
    wrong = [
        (tensors, {"temperature": 0.0}, {}),
        (tensors | {"target": tensors["target"][1:]}, {}, {}),
        (tensors | {"ref_hidden": tensors["ref_hidden"][1:]}, {}, {}),
        (tensors, {"chunk_tokens": 0}, {}),
        (tensors, {}, {"accumulate_into_main_grad": True}),
    ]
    messages = []
    for changed, fields, options in wrong:
        try:
            _call(Problem(**(problem.__dict__ | fields)), changed, False, **options)
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
    unknown = tensors["target"].clone()
    unknown[3] = problem.vocab_size  # the id of a padded row
    logp = _call(problem, tensors | {"target": unknown}, False).logp
    assert logp.isnan().nonzero().tolist() == [[3]]
    return messages
