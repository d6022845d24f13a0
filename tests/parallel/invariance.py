"""Functions that the invariance suite runs on each rank, and the comparison with one rank."""

import importlib
import re
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from grpo_megatron.batch.token_stream import TokenStream
from grpo_megatron.config.command import Command
from grpo_megatron.config.schema import Config
from grpo_megatron.megatron.actor import Actor
from grpo_megatron.megatron.process_groups import RankInfo
from grpo_megatron.megatron.state.hf_weights import local_parameters, whole_tensors
from grpo_megatron.metrics import Metrics, merge, to_floats
from grpo_megatron.model.adapters import adapter_entries
from grpo_megatron.model.families import weight_map
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.model.pieces import box
from tests.configs import sizes_of, with_megatron
from tests.parallel.actors import micro_batches, reference_logprobs


@dataclass
class Case:
    """One way to compute two optimizer steps. If the model has adapters, they are compared."""

    config: Config
    """The actor's configuration."""
    loss: object
    """The loss."""
    batches: list[TokenStream]
    """A batch for each step."""
    packing: bool = True
    """Whether micro-batches are packed."""
    max_tokens: int = 256
    """Most tokens of a micro-batch."""
    partition: ParallelSizes | None = None
    """Layout whose micro-batches are used, if not that of config: one rank can follow the partition of
    several.
    """
    fault: str | None = None
    """Name of a planted fault, or None."""
    start: Callable[[Actor], None] | None = None
    """Called with the actor before the first step."""
    command: Command = Command.train
    """Command of the run: a policy or a reward model is trained."""


@dataclass
class RankResult:
    """The result of one rank."""

    rank: RankInfo
    """The rank's place in the layout."""
    gradients: dict[str, tuple[int, torch.Tensor]]
    """Gradients of the first step, as flat slices {name: (start, values)}."""
    parameters: dict[str, torch.Tensor]
    """This rank's parameters at the end."""
    loss: list[Metrics]
    """Metrics of each step."""
    grad_norm: list[float]
    """Gradient norm of each step."""


def two_steps(case: Case) -> RankResult:
    with planted(case.fault):
        actor = Actor(case.config, case.command)
        if case.start:
            case.start(actor)
        trained = local_parameters(actor.model.chunks, adapters=bool(actor.model.adapters))
        gradients, losses, norms = {}, [], []
        for step, batch in enumerate(case.batches):
            parts = share(case, batch, actor.rank.dp_rank)
            reference = case.loss.needs_full_kl
            if reference:
                reference_logprobs(actor, parts, key=(step, 0), keep_hidden=True)
            metrics = actor.passes.compute_gradients(parts, case.loss, batch.num_tokens, key=(step, 0))
            if step == 0:
                gradients = {name: owned_gradient(actor, p) for name, p in trained.items()}
            with actor.model.memory.optimizer_at_hand():
                outcome = actor.model.optimizer.step()
            assert not outcome.dropped
            losses.append(metrics)
            norms.append(outcome.grad_norm)
        with actor.model.settled_weights():
            parameters = {name: p.detach().clone() for name, p in trained.items()}
        return RankResult(actor.rank, gradients, parameters, losses, norms)


def share(case: Case, batch: TokenStream, dp_rank: int) -> list[TokenStream]:
    sizes = case.partition or sizes_of(case.config)
    config = with_megatron(case.config, **sizes.settings())
    ranks = [dp_rank] if sizes_of(case.config).dp == sizes.dp else range(sizes.dp)
    pairs = case.command == Command.reward_model
    return [
        part
        for rank in ranks
        for part in micro_batches(batch, config, rank, case.packing, case.max_tokens, pairs)[1]
    ]


def owned_gradient(actor: Actor, parameter) -> tuple[int, torch.Tensor]:
    """Return (start, flat values) of the slice of the gradient that this rank ends up with.

    With the distributed optimizer it is a part, otherwise the whole gradient.
    """
    flat = parameter.main_grad.detach().flatten().clone()
    if not actor.config.megatron.distributed_optimizer:
        return 0, flat
    for optimizer in actor.model.optimizer.parts():
        if parameter in optimizer.model_param_group_index_map:
            owned = optimizer._get_model_param_range_map(parameter)["param"]
            return owned.start, flat[owned.start : owned.end]
    return 0, flat[:0]


def _keys_gradients_stay(plain):
    return lambda tensor, group: plain(tensor, group=group, tensor_parallel_output_grad=False)


def _own_sums_only(plain):
    return lambda tensor, group, cp: tensor


def _chunks_of_a_stage_adjacent(plain):
    """Plant a fault: number the layers as if a stage's chunks followed each other, for 2 stages of 2
    one-layer chunks.
    """

    def local_parameters(chunks, adapters=False):
        wrong = {"0": "0", "2": "1", "1": "2", "3": "3"}
        return {
            re.sub(r"(?<=layers\.)\d+", lambda number: wrong[number[0]], n): p
            for n, p in plain(chunks, adapters).items()
        }

    return local_parameters


def _megatrons_own(plain):
    from megatron.core.transformer.moe.router import TopKRouter

    return TopKRouter._apply_aux_loss


def _own_tokens_only(plain):
    def add_adapter(self, lora, whole):
        plain(self, lora, whole)
        getattr(self, whole).sequence_parallel = False

    return add_adapter


def _one_sequence(plain):
    return lambda lengths, device: plain(np.array([lengths.sum()]), device)


def _no_sum(plain):
    return lambda weight: weight


def _heads_gradients_stay(plain):
    def all_to_all(group, tensor):
        return tensor + (plain(group, tensor) - tensor).detach()

    return all_to_all


def _summed_already(plain):
    from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region

    def share(self, parameter, sections):
        return plain(self, copy_to_tensor_model_parallel_region(parameter, group=self.group), sections)

    return share


# Faults of the kinds that stacks of this sort have had: (module[:class], name in it, what replaces it).
FAULTS = {
    "keys' gradients stay on their CP rank": (
        "grpo_megatron.megatron.layers.attention",
        "gather_from_sequence_parallel_region",
        _keys_gradients_stay,
    ),
    "sequence sums of one CP rank": ("grpo_megatron.batch.layout", "_sum_over", _own_sums_only),
    "adapters' gradients of one TP rank's tokens": (
        "grpo_megatron.megatron.layers.lora:_Adapted",
        "_add_adapter",
        _own_tokens_only,
    ),
    "states go on at boundaries": (
        "grpo_megatron.megatron.layers.delta_rule:Chunks",
        "of",
        _one_sequence,
    ),
    "heads' gradients stay on their CP rank": (
        "grpo_megatron.megatron.layers.head_exchange",
        "all_to_all",
        _heads_gradients_stay,
    ),
    "gradients of exchanged heads are summed twice": (
        "grpo_megatron.megatron.layers.head_exchange:HeadExchange",
        "share",
        _summed_already,
    ),
    "gradient of one TP rank's heads": (
        "grpo_megatron.megatron.layers.delta_net",
        "copy_to_tensor_model_parallel_region",
        _no_sum,
    ),
    "wrong VPP order": (
        "grpo_megatron.megatron.state.hf_weights",
        "local_parameters",
        _chunks_of_a_stage_adjacent,
    ),
    "auxiliary losses by one rank's tokens": (
        "grpo_megatron.megatron.layers.router:Router",
        "_apply_aux_loss",
        _megatrons_own,
    ),
}


@contextmanager
def planted(fault: str | None):
    if fault is None:
        yield
        return
    where, name, wrap = FAULTS[fault]
    module, _, inside = where.partition(":")
    owner = importlib.import_module(module)
    owner = getattr(owner, inside) if inside else owner
    plain = getattr(owner, name)
    setattr(owner, name, wrap(plain))
    try:
        yield
    finally:
        setattr(owner, name, plain)


@dataclass(frozen=True)
class LocalMean:
    """A planted fault: a loss that divides by the trained tokens of its own micro-batch."""

    inner: object
    needs_full_kl = False

    def __call__(self, logp, entropy, inputs, full_kl=None):
        loss, metrics = self.inner(logp, entropy, inputs, full_kl)
        return loss / inputs.mask.sum().clamp(min=1), metrics


def in_hf_names(entries, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return whole Megatron tensors of one rank as HF tensors."""
    found = {}
    for name, tensor in tensors.items():
        found.update(whole_tensors(entries[name], [tensor]))
    return found


def worst_difference(
    arch, sizes, result: RankResult, expected: RankResult, adapters: dict | None = None
) -> dict[str, float]:
    """Return {gradient or parameter: largest difference from one rank's, in units of the tolerance}.

    A value above 1 is a failure. The tolerance is 1e-5 of the tensor's largest entry, or 1e-11 of the largest
    of all tensors.

    adapters: their entries, if they are compared.
    """
    found = {}
    whole_shape = {name: p.shape for name, p in expected.parameters.items()}
    gradients = {name: flat.view(whole_shape[name]) for name, (_, flat) in expected.gradients.items()}
    entries = adapters or weight_map(arch)
    for kind, one in (("gradient of", gradients), ("parameter", expected.parameters)):
        reference = in_hf_names(entries, one)
        largest = max(float(tensor.abs().max()) for tensor in one.values())
        for name, values in (result.gradients if kind == "gradient of" else result.parameters).items():
            entry = entries[name]
            tp, rank = (sizes.etp, result.rank.etp_rank) if entry.expert else (sizes.tp, result.rank.tp_rank)
            shard = torch.zeros(entry.megatron_shape(tp))
            for piece in entry.megatron_pieces(tp, rank):
                piece.of(shard).copy_(reference[piece.hf][box(piece.start, piece.shape)])
            shard = shard.flatten()
            start, own = values if kind == "gradient of" else (0, values.flatten())
            shard = shard[start : start + own.numel()]
            if own.numel():
                of_tensor = max(float(reference[hf].abs().max()) for hf in entry.hf)
                tolerance = 1e-5 * max(of_tensor, 1e-6 * largest)
                found[f"{kind} {name}"] = float((own - shard).abs().max()) / tolerance
    return found


def check(arch, case: Case, results: list[RankResult], expected: RankResult) -> None:
    """Check that loss, gradients and parameters of every rank are those of one rank."""
    reporting = [result for result in results if result.rank.reports]
    assert len(reporting) == sizes_of(case.config).dp
    for step in range(len(case.batches)):
        metrics = to_floats(merge([result.loss[step] for result in reporting]))
        for name, value in to_floats(expected.loss[step]).items():
            np.testing.assert_allclose(
                metrics[name], value, rtol=1e-5, atol=1e-6, err_msg=f"{name}, step {step}"
            )
        np.testing.assert_allclose([r.grad_norm[step] for r in results], expected.grad_norm[step], rtol=1e-5)
    covered: set[str] = set()
    adapters = adapter_entries(weight_map(arch).values(), case.config.megatron.lora)
    for result in results:
        differences = worst_difference(arch, sizes_of(case.config), result, expected, adapters)
        wrong = {name: f"{ratio:.1f}" for name, ratio in differences.items() if not ratio <= 1}
        assert not wrong, f"{result.rank}: beyond the tolerance by these factors: {wrong}"
        covered |= result.parameters.keys()
    assert expected.parameters.keys() <= covered
