"""Functions that the tests of the reference run on each rank."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from grpo_megatron.algorithm.losses import TokenLoss
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.config.schema import Config, ModelConfig
from grpo_megatron.megatron.actor import Actor
from grpo_megatron.megatron.state import reference
from grpo_megatron.megatron.state.hf_weights import local_parameters
from grpo_megatron.model.families import read_architecture
from grpo_megatron.trainer.mini_batch import MiniBatch, make_mini_batches
from tests.models import random_samples
from tests.parallel.actors import micro_batches, reference_logprobs
from tests.parallel.mini_batches import TrainerOnEveryRank, groups_of


@dataclass
class Step:
    exchanges: int
    weights_stayed: bool
    micro_batches: list[int]  # their number in each mini-batch
    # Of each mini-batch: old_logp, ref_logp, and "alone": ref_logp for which alone weights were exchanged.
    logprobs: list[dict[str, np.ndarray]]


def before_training(config: Config) -> Step:
    """Do the passes of one step as the controller does them."""
    actor, exchanges = Actor(config), []
    plain = actor.model.reference._exchange
    actor.model.reference._exchange = lambda: exchanges.append(plain())
    samples = random_samples(count=config.data.train_batch_size * 4)
    groups = groups_of(samples)
    mini_batches = make_mini_batches(groups, config, read_architecture(config.model.path).cost_model, step=1)
    trainer = TrainerOnEveryRank(actor)
    before = weights_of(actor)
    trainer.measure(mini_batches)
    made, after = len(exchanges), weights_of(actor)
    logprobs = [
        actor.mini_batches.read(mini.key, ("old_logp", "ref_logp"))
        | {"alone": logprobs_of_reference(actor, mini)}
        for mini in mini_batches
    ]
    parts = [len(mini.plan.micro_batches[0]) for mini in mini_batches]
    return Step(made, equal(before, after), parts, logprobs)


def logprobs_of_reference(actor: Actor, mini: MiniBatch) -> np.ndarray:
    """Return the reference's log-probs of a mini-batch, for which alone the weights are exchanged."""
    micro_batches = [
        TrainBatch.from_samples([mini.samples[i] for i in part]) for part in mini.plan.micro_batches[0]
    ]
    return reference_logprobs(actor, micro_batches, trained_only=True)


def weights_of(actor: Actor) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in local_parameters(actor.model.chunks).items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def exchanged(config: Config, piece: int) -> tuple[bool, bool, bool]:
    """Exchange the weights and back, and return three truth values.

    They say whether the reference's weights were in the policy's place, whether they differ from the
    policy's, and whether the policy's came back bit for bit.

    piece: bytes that are exchanged at a time.
    """
    usual = dict(reference._PIECE)
    reference._PIECE.update(dict.fromkeys(usual, piece))
    try:
        actor = Actor(config)
        expected = weights_of(Actor(replace(config, model=ModelConfig(path=config.ref.path))))
        policy = weights_of(actor)
        with actor.passes.reference():
            within = weights_of(actor)
        return equal(within, expected), not equal(within, policy), equal(weights_of(actor), policy)
    finally:
        reference._PIECE.update(usual)


def refusals(config: Config, batch, loss: TokenLoss, folder: str) -> dict[str, str]:
    """Try several calls with the reference's weights in the policy's place.

    Return {call: error, or "" if it succeeded}.
    """
    actor = Actor(config)
    _, parts = micro_batches(batch, config, 0, packing=True)
    tried = {
        "policy pass": lambda: actor.passes.logprobs(parts),
        "training": lambda: actor.passes.train_step(parts, loss, batch.num_tokens),
        "gradients": lambda: actor.passes.compute_gradients(parts, loss, batch.num_tokens),
        "checkpoint": lambda: actor.checkpoints.begin(folder),
        "resume": lambda: actor.checkpoints.load(folder),
        "export": lambda: actor.weights.save_hf(folder),
        "sync": lambda: actor.weights.send(None),
        "reset": lambda: actor.weights.reset_reference(),
        "sleep": lambda: actor.memory.sleep(),
        "second begin": lambda: actor.passes.reference().__enter__(),
    }
    found = {"reference pass": said(lambda: actor.passes.logprobs(parts, reference=True))}
    before, first = weights_of(actor), actor.passes.logprobs(parts)
    with actor.passes.reference():
        found |= {name: said(call) for name, call in tried.items()}
        within = actor.passes.logprobs(parts, reference=True)
    assert equal(weights_of(actor), before)
    assert np.array_equal(actor.passes.logprobs(parts), first)
    assert not np.array_equal(within, first)
    return found


def said(call) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def gradients_of_full_kl(config: Config, batches, loss: TokenLoss):
    """Return the gradients of each mini-batch of two steps, and how many micro-batches' hidden states were
    on the host.
    """
    actor, gradients, on_host = Actor(config), [], []
    for step in (1, 2):
        parts = [micro_batches(batch, config, 0, packing=True, max_tokens=200)[1] for batch in batches]
        with actor.passes.reference():
            for number, own in enumerate(parts):
                actor.passes.logprobs(own, reference=True, key=(step, number), keep_hidden=True)
        arena = actor.passes.prepared._hidden_on_host
        for number, own in enumerate(parts):
            actor.passes.compute_gradients(
                own, loss, sum(part.num_tokens for part in own), key=(step, number)
            )
            gradients.append(
                {name: p.main_grad.clone() for name, p in local_parameters(actor.model.chunks).items()}
            )
        on_host.append(sum(arena._used))
    assert len(arena._blocks) <= 1, "the second step has the memory of the first"
    return gradients, on_host


def without_hidden(config: Config, batch, loss: TokenLoss) -> str:
    actor = Actor(config)
    _, parts = micro_batches(batch, config, 0, packing=True)
    reference_logprobs(actor, parts, key=(1, 0))
    return said(lambda: actor.passes.compute_gradients(parts, loss, batch.num_tokens, key=(1, 0)))
