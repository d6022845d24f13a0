"""What the optimizer tests run on each rank."""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.megatron.actor import Actor
from grpo_megatron.megatron.process_groups import RankInfo
from grpo_megatron.megatron.spec import ActorSpec, TrainResult
from grpo_megatron.megatron.weights import local_parameters
from tests.parallel.actors import micro_batches
from tests.parallel.invariance import Case, RankResult, owned_gradient, share


@dataclass
class State:
    """All that an optimizer step may change on one rank.

    tensors: weights, and what is optimized (master weights, or the weights themselves) with its moments.
    numbers: counters and rates of the parameter groups and of the schedule.
    """

    tensors: dict[str, torch.Tensor]
    numbers: dict[str, float]


def parameters_of(actor: Actor) -> dict[str, torch.Tensor]:
    with actor._settled_weights():
        return {name: p.detach().clone() for name, p in local_parameters(actor.chunks).items()}


def state_of(actor: Actor) -> State:
    tensors: dict[str, torch.Tensor] = dict(parameters_of(actor))
    numbers = {"scheduler": actor.optimizer.scheduler.num_steps}
    for i, part in enumerate(actor.optimizer.parts()):
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
    """(its parameter group, what Adam updates in its place, Adam's state of that); None: another replica has it."""
    for part in actor.optimizer.parts():
        groups = part.optimizer.param_groups
        if actor.spec.distributed_optimizer:
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
    _, parts = micro_batches(batch, actor.spec, actor.rank.dp_rank, packing=True)
    return actor.train_step(parts, loss, batch.num_tokens)


def states_after_steps(
    spec: ActorSpec, batches: list[TrainBatch], loss
) -> tuple[list[State], list[TrainResult | None]]:
    """State before the first and after every step; what the steps reported."""
    actor = Actor(spec)
    states, results = [state_of(actor)], []
    for batch in batches:
        results.append(step(actor, batch, loss))
        states.append(state_of(actor))
    return states, results


def shrunk_by_decay(spec: ActorSpec, batch: TrainBatch, loss) -> dict[str, float]:
    """{global name: factor one step with a zero gradient multiplied this parameter by}, which only decay can."""
    actor = Actor(spec)
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


def disagreement(spec: ActorSpec, batch: TrainBatch, loss) -> tuple[float, bool]:
    """(norm, dropped) on a rank where the norms of two replicas are on two sides of the limit, a last bit apart."""
    actor = Actor(spec)
    limit = spec.optimizer.max_grad_norm_to_step
    norm = limit if dist.get_rank() == 0 else math.nextafter(limit, math.inf)
    actor.optimizer.inner.get_grad_norm = lambda: norm
    _, parts = micro_batches(batch, spec, actor.rank.dp_rank, packing=True)
    actor.compute_gradients(parts, loss, batch.num_tokens)
    return norm, actor.optimizer.step().dropped


def one_step(case: Case) -> tuple[dict[str, torch.Tensor], RankResult]:
    """(parameters before, result of) one step on the first batch of the case."""
    actor = Actor(case.spec)
    before = parameters_of(actor)
    batch = case.batches[0]
    metrics = actor.compute_gradients(share(case, batch, actor.rank.dp_rank), case.loss, batch.num_tokens)
    gradients = {name: owned_gradient(actor, p) for name, p in local_parameters(actor.chunks).items()}
    outcome = actor.optimizer.step()
    return before, RankResult(actor.rank, gradients, parameters_of(actor), [metrics], [outcome.grad_norm])


@dataclass
class Masters:
    """Of one parameter after each step (0: before): its own values and those of its master, both flat."""

    weights: list[torch.Tensor]
    masters: list[torch.Tensor]
    dtypes: set[torch.dtype]


def masters_after_steps(spec: ActorSpec, batch: TrainBatch, loss, steps: int) -> dict[str, Masters]:
    """Many steps on one batch; the part of each parameter whose master this rank has. dtypes: of master and moments."""
    actor = Actor(spec)
    found: dict[str, Masters] = {}
    for number in range(steps + 1):
        if number:
            step(actor, batch, loss)
        whole = parameters_of(actor)
        for name, parameter in local_parameters(actor.chunks).items():
            owned = optimized(actor, parameter)
            if owned is None:
                continue
            _, master, moments = owned
            values = whole[name].flatten()
            if spec.distributed_optimizer:
                part = next(p for p in actor.optimizer.parts() if parameter in p.model_param_group_index_map)
                own = part._get_model_param_range_map(parameter)["param"]
                values = values[own.start : own.end]
            entry = found.setdefault(name, Masters([], [], set()))
            entry.weights.append(values)
            entry.masters.append(master.detach().flatten().clone())
            entry.dtypes |= {tensor.dtype for tensor in (master, *moments.values())}
    return found


@dataclass
class Run:
    """rates: of the steps, on ranks that report. decay, moments: of each parameter this rank optimizes, at the end
    (no moments of slices of parameters)."""

    rank: RankInfo
    rates: list[float]
    decay: dict[str, float]
    moments: dict[str, torch.Tensor]


def rates_and_groups(
    spec: ActorSpec, batches: list[TrainBatch], loss, load: str | None = None, save: str | None = None
) -> Run:
    actor = Actor(spec)
    if load:
        actor.load_checkpoint(load)
    results = [step(actor, batch, loss) for batch in batches]
    if save:
        actor.begin_checkpoint(save)
        actor.finish_checkpoint()
    decay, moments = {}, {}
    for name, parameter in local_parameters(actor.chunks).items():
        owned = optimized(actor, parameter)
        if owned:
            group, _, state = owned
            decay[name] = group["weight_decay"]
            if not spec.distributed_optimizer:
                moments[name] = state["exp_avg"].clone()
    return Run(actor.rank, [result.lr for result in results if result], decay, moments)
