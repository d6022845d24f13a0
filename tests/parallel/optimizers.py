"""Functions that the optimizer tests run on each rank."""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.config.schema import Config
from grpo_megatron.megatron.actor import Actor
from grpo_megatron.megatron.process_groups import RankInfo
from grpo_megatron.megatron.results import TrainResult
from grpo_megatron.megatron.state.hf_weights import local_parameters
from tests.parallel.actors import micro_batches
from tests.parallel.invariance import Case, RankResult, owned_gradient, share


@dataclass
class State:
    """Everything that an optimizer step may change on one rank.

    tensors: weights, and the optimized tensors (master weights, or the weights themselves) with their
        moments.
    numbers: counters and rates of the parameter groups and the schedule.
    """

    tensors: dict[str, torch.Tensor]
    numbers: dict[str, float]


def parameters_of(actor: Actor) -> dict[str, torch.Tensor]:
    with actor.model.settled_weights():
        return {name: p.detach().clone() for name, p in local_parameters(actor.model.chunks).items()}


def state_of(actor: Actor) -> State:
    tensors: dict[str, torch.Tensor] = dict(parameters_of(actor))
    numbers = {"scheduler": actor.model.optimizer.scheduler.num_steps}
    for i, part in enumerate(actor.model.optimizer.parts()):
        for j, group in enumerate(part.optimizer.param_groups):
            numbers |= {
                f"{i}.{j}.{key}": group[key] for key in ("lr", "weight_decay", "step") if key in group
            }
            for k, parameter in enumerate(group["params"]):
                tensors[f"{i}.{j}.{k}.optimized"] = parameter.detach().clone()
                state = part.optimizer.state[parameter]
                tensors |= {
                    f"{i}.{j}.{k}.{key}": value.clone()
                    for key, value in state.items()
                    if torch.is_tensor(value)
                }
    return State(tensors, numbers)


def optimized(actor: Actor, parameter: torch.nn.Parameter) -> tuple[dict, torch.Tensor, dict] | None:
    """Return (its parameter group, the tensor that Adam updates for it, Adam's state of that), or None on
    other replicas.
    """
    for part in actor.model.optimizer.parts():
        groups = part.optimizer.param_groups
        if actor.config.megatron.distributed_optimizer:
            if parameter not in part.model_param_group_index_map:
                continue
            group, order = part.model_param_group_index_map[parameter]
            found = groups[group], groups[group]["params"][order]
        else:
            target = getattr(parameter, "main_param", parameter)
            found = next(
                ((group, target) for group in groups if any(p is target for p in group["params"])), None
            )
        if found:
            return *found, part.optimizer.state[found[1]]
    return None


def step(actor: Actor, batch: TrainBatch, loss) -> TrainResult | None:
    _, parts = micro_batches(batch, actor.config, actor.rank.dp_rank, packing=True)
    return actor.passes.train_step(parts, loss, batch.num_tokens)


def states_after_steps(
    config: Config, batches: list[TrainBatch], loss
) -> tuple[list[State], list[TrainResult | None]]:
    """Return the states before the first and after every step, and the results of the steps."""
    actor = Actor(config)
    states, results = [state_of(actor)], []
    for batch in batches:
        results.append(step(actor, batch, loss))
        states.append(state_of(actor))
    return states, results


def shrunk_by_decay(config: Config, batch: TrainBatch, loss) -> dict[str, float]:
    """Return {global name: factor by which a step with a zero gradient multiplied the parameter}.

    Only weight decay can do that.
    """
    actor = Actor(config)
    before = parameters_of(actor)
    step(actor, batch, loss)
    factors = {}
    for name, after in parameters_of(actor).items():
        factor = float(after.flatten() @ before[name].flatten() / before[name].square().sum())
        torch.testing.assert_close(
            after, before[name] * factor, rtol=1e-5, atol=1e-6, msg=f"{name} moved otherwise too"
        )
        factors[name] = factor
    return factors


def disagreement(config: Config, batch: TrainBatch, loss) -> tuple[float, bool]:
    """Return (norm, dropped) of a rank, where the norms of two replicas lie a last bit apart on both sides
    of the limit.
    """
    actor = Actor(config)
    limit = config.optimizer.max_grad_norm_to_step
    norm = limit if dist.get_rank() == 0 else math.nextafter(limit, math.inf)
    actor.model.optimizer.inner.get_grad_norm = lambda: norm
    _, parts = micro_batches(batch, config, actor.rank.dp_rank, packing=True)
    actor.passes.compute_gradients(parts, loss, batch.num_tokens)
    return norm, actor.model.optimizer.step().dropped


def one_step(case: Case) -> tuple[dict[str, torch.Tensor], RankResult]:
    """Return the parameters before a step on the first batch of the case, and the step's result."""
    actor = Actor(case.config)
    before = parameters_of(actor)
    batch = case.batches[0]
    metrics = actor.passes.compute_gradients(
        share(case, batch, actor.rank.dp_rank), case.loss, batch.num_tokens
    )
    gradients = {name: owned_gradient(actor, p) for name, p in local_parameters(actor.model.chunks).items()}
    outcome = actor.model.optimizer.step()
    return before, RankResult(actor.rank, gradients, parameters_of(actor), [metrics], [outcome.grad_norm])


@dataclass
class Masters:
    """One parameter after each step (0: before).

    weights, masters: the parameter's own values and its master's, both flat.
    dtypes: dtypes of master and moments.
    """

    weights: list[torch.Tensor]
    masters: list[torch.Tensor]
    dtypes: set[torch.dtype]


def masters_after_steps(config: Config, batch: TrainBatch, loss, steps: int) -> dict[str, Masters]:
    """Do many steps on one batch, and return the part of each parameter whose master this rank has."""
    actor = Actor(config)
    found: dict[str, Masters] = {}
    for number in range(steps + 1):
        if number:
            step(actor, batch, loss)
        whole = parameters_of(actor)
        for name, parameter in local_parameters(actor.model.chunks).items():
            owned = optimized(actor, parameter)
            if owned is None:
                continue
            _, master, moments = owned
            values = whole[name].flatten()
            if config.megatron.distributed_optimizer:
                part = next(
                    p for p in actor.model.optimizer.parts() if parameter in p.model_param_group_index_map
                )
                own = part._get_model_param_range_map(parameter)["param"]
                values = values[own.start : own.end]
            entry = found.setdefault(name, Masters([], [], set()))
            entry.weights.append(values)
            entry.masters.append(master.detach().flatten().clone())
            entry.dtypes |= {tensor.dtype for tensor in (master, *moments.values())}
    return found


@dataclass
class Run:
    """A run of several steps on one rank.

    rates: learning rates of the steps, on ranks that report.
    decay, moments: of each parameter that this rank optimizes, at the end (no moments of slices of
        parameters).
    """

    rank: RankInfo
    rates: list[float]
    decay: dict[str, float]
    moments: dict[str, torch.Tensor]


def rates_and_groups(
    config: Config, batches: list[TrainBatch], loss, load: str | None = None, save: str | None = None
) -> Run:
    actor = Actor(config)
    if load:
        actor.checkpoints.load(load)
    results = [step(actor, batch, loss) for batch in batches]
    if save:
        actor.checkpoints.begin(save)
        actor.checkpoints.finish()
    decay, moments = {}, {}
    for name, parameter in local_parameters(actor.model.chunks).items():
        owned = optimized(actor, parameter)
        if owned:
            group, _, state = owned
            decay[name] = group["weight_decay"]
            if not config.megatron.distributed_optimizer:
                moments[name] = state["exp_avg"].clone()
    return Run(actor.rank, [result.lr for result in results if result], decay, moments)
