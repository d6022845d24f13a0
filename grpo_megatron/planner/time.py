"""Times of the phases of a step, by a cost model that has not been compared with measurements on a GPU.

Work is divided by the speed in the data sheet (capabilities.GPUS), multiplied by the share of this speed that
kernels and links are assumed to reach:

- training and log-prob passes: 6 (training) or 2 (log-probs) FLOPs for each token and each weight it uses,
  plus the FLOPs of attention (PaLM, arXiv:2204.02311, appendix B) and of recomputation, divided evenly over
  the ranks; then the busiest pipeline stage and the pipeline's bubble (p - 1) / (v m), for p stages of v
  chunks and m micro-batches (Narayanan et al., arXiv:2104.04473, section 2.2); then the messages of tensor,
  expert, context and pipeline parallelism, each with its latency, as if none were overlapped with compute.
- generation: planner.generation.
- weight sync: the reshard plan and weights.sync.cost, see planner.resharding.

Not included: rewards other than those of a reward model, data, checkpoints, evaluation, and stragglers.
"""

from collections import Counter
from dataclasses import dataclass
from math import ceil

from grpo_megatron.capabilities import GPUS
from grpo_megatron.config.schema import Config, OldLogprobs, Placement, Precision, Recompute
from grpo_megatron.model.architecture import Architecture
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.planner.activations import delta_bytes, layers_of, recomputed_modules
from grpo_megatron.planner.engines import EngineRoom
from grpo_megatron.planner.generation import generation_seconds
from grpo_megatron.planner.lengths import Lengths
from grpo_megatron.planner.memory import takes_turns
from grpo_megatron.planner.rates import (
    ATTENTION,
    BANDWIDTH,
    EXPERT_PRODUCTS,
    FABRIC_SECONDS,
    LINKS,
    NETWORK_SECONDS,
    PRODUCTS,
)
from grpo_megatron.planner.reward_model import scorer
from grpo_megatron.planner.states import TrainingState, itemsize, stage_elements, training_states


@dataclass(frozen=True)
class Times:
    """Estimated times of one training step."""

    seconds: dict[str, float]
    """{phase: seconds}, such as {"generation": 60.5}."""
    tokens: float
    """Tokens of all prompts and responses of the step."""
    gpus: int
    """Number of GPUs of trainer and engines."""
    mfu: float
    """Model FLOPs utilisation of the training pass (arXiv:2204.02311 appendix B): its FLOPs without
    recomputation, divided by the FLOPs that the trainer's GPUs could compute in that time by their data
    sheet."""
    beside: bool = False
    """True if engines generate while the trainer works (rollout.staleness)."""

    @property
    def step(self) -> float:
        if not self.beside:
            return sum(self.seconds.values())
        return max(self.of_engines, self.of_trainer)

    @property
    def of_engines(self) -> float:
        """Seconds of a step for which the engines are needed: generation, and the weight sync."""
        return self.seconds["generation"] + self.seconds.get("weight sync", 0.0)

    @property
    def of_trainer(self) -> float:
        """Seconds of a step for which the trainer is needed: all phases except generation."""
        return sum(self.seconds.values()) - self.seconds["generation"]

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens / self.step / self.gpus

    @property
    def bottleneck(self) -> str:
        return max(self.seconds, key=self.seconds.__getitem__)


def num_gpus(config: Config) -> int:
    """Return the number of GPUs that trainer and engines use."""
    ranks = ParallelSizes.from_config(config.megatron).world_size
    engines = config.rollout.engine.num_engines * config.rollout.engine.tensor_parallel
    return max(ranks, engines) if config.cluster.placement == Placement.colocated else ranks + engines


def times(
    config: Config, arch: Architecture, states: list[TrainingState], room: EngineRoom, lengths: Lengths
) -> Times:
    """Estimate the times of a training step, without the weight sync.

    states: memory of a trainer rank in each pipeline stage, as planner.states.training_states returns it.
    room: numbers of tokens and requests for which one engine has room, above 0.
    lengths: mean lengths of prompts and responses.
    """
    passes = _Passes(config, arch, lengths)
    seconds = {"generation": generation_seconds(config, arch, room, lengths)}
    seconds |= _scoring_seconds(config, lengths) | passes.logprob_seconds(states)
    seconds["training"] = config.train.ppo_epochs * passes.seconds(training=True)
    seconds["gradients, optimizer"] = passes.optimizer_seconds(states)
    if takes_turns(config):
        held = max(s.parameters + (0 if config.optimizer.offload else s.optimizer) for s in states)
        seconds["sleep, wake"] = 2 * held / (LINKS * passes.speed.host)
    samples = config.data.train_batch_size * config.rollout.n
    beside = config.rollout.staleness > 0
    return Times(seconds, samples * lengths.sequence, num_gpus(config), passes.mfu(), beside)


def _scoring_seconds(config: Config, lengths: Lengths) -> dict[str, float]:
    """Return {"scoring": seconds to load a reward model and score all samples}; {} without a reward model."""
    found = scorer(config)
    if found is None:
        return {}
    passes = _Passes(found.config, found.arch, lengths)
    weights = max(state.parameters for state in training_states(found.arch, found.config.megatron))
    return {"scoring": weights / (LINKS * passes.speed.host) + passes.seconds(training=False)}


@dataclass(frozen=True)
class _Flops:
    """FLOPs of one sequence's forward pass, by kind of kernel. The kinds reach different speeds."""

    projections: float
    """FLOPs of the projections of attention and of gated delta networks."""
    mlp: float
    """FLOPs of the MLP in layers without experts."""
    experts: float
    """FLOPs of the router, the top_k experts and the shared experts."""
    head: float
    """FLOPs of the output projection."""
    attention: float
    """FLOPs of the attention kernel."""
    states: float
    """FLOPs of the gated delta rule."""

    @classmethod
    def of(cls, arch: Architecture, length: float) -> "_Flops":
        """Count the FLOPs of a sequence of `length` tokens."""
        cost, moe = arch.cost_model, arch.moe
        with_experts = sum(moe.layers) if moe else 0
        mlp = 6.0 * (arch.num_layers - with_experts) * arch.hidden_size * arch.ffn_hidden_size
        experts = 0.0
        if moe:
            ffn = moe.top_k * moe.ffn_hidden_size + moe.shared_ffn_hidden_size
            router = moe.num_experts + moe.shared_gate
            experts = 2.0 * with_experts * arch.hidden_size * (router + 3 * ffn)
        head = 2.0 * arch.hidden_size * arch.num_outputs
        states = 2.0 * arch.num_recurrent * arch.delta.state_products if arch.delta else 0.0
        attention = float(cost.flops([length])[0]) - cost.per_token * length
        return cls(
            (cost.per_token - mlp - experts - head - states) * length,
            mlp * length,
            experts * length,
            head * length,
            attention,
            states * length,
        )

    @property
    def total(self) -> float:
        return self.projections + self.mlp + self.experts + self.head + self.attention + self.states


class _Passes:
    """Cost model of the trainer's part of a step: passes over the samples, and the optimizer."""

    def __init__(self, config: Config, arch: Architecture, lengths: Lengths):
        self.config, self.arch, self.lengths = config, arch, lengths
        self.sizes = ParallelSizes.from_config(config.megatron)
        self.speed = GPUS[config.cluster.gpu].speed
        self.samples = config.data.train_batch_size * config.rollout.n
        self.flops = _Flops.of(arch, lengths.sequence)
        self.stages = layers_of(arch, self.sizes)

    def seconds(self, training: bool) -> float:
        """Return the seconds of one pass over all samples of a step.

        training: True for a forward and backward pass over each mini-batch in turn, without the optimizer;
            False for a forward pass that computes log-probs.
        """
        config, sizes = self.config, self.sizes
        prompts = config.train.ppo_mini_batch_size if training else config.data.train_batch_size
        # Tokens of a rank in an optimizer step.
        tokens = prompts * config.rollout.n * self.lengths.sequence / (sizes.dp * sizes.cp)
        micro_batches = max(1, ceil(tokens / config.train.max_tokens_per_micro_batch))
        bubble = (sizes.pp - 1) / (sizes.vpp * micro_batches)
        computed, times_sent = self._forward(), 1
        if training:
            computed = 3 * computed + self._recomputed()
            times_sent = 3 if config.megatron.recompute == Recompute.full else 2
        sent = config.data.train_batch_size / prompts * micro_batches * self._sent(tokens / micro_batches)
        return (computed * self._imbalance() + times_sent * sent) * (1 + bubble)

    def logprob_seconds(self, states: list[TrainingState]) -> dict[str, float]:
        """Return {phase: seconds} of the passes for the log-probs of the old policy and of the reference.

        The dict has only the passes that the run makes. The reference pass includes loading the reference's
        weights in place of the policy's, and restoring the policy's afterwards.

        states: memory of a trainer rank in each pipeline stage.
        """
        config, found = self.config, {}
        if config.train.old_logprobs == OldLogprobs.recompute:
            found["old log-probs"] = self.seconds(training=False)
        if config.algorithm.needs_reference:
            link = LINKS * self.speed.host if config.ref.offload else BANDWIDTH * self.speed.memory
            exchanges = 2 * max(state.parameters for state in states) / link
            found["reference log-probs"] = self.seconds(training=False) + exchanges
        return found

    def optimizer_seconds(self, states: list[TrainingState]) -> float:
        """Return the seconds of all optimizer steps of a training step, without forward and backward passes.

        An optimizer step sums gradients over the replicas, updates states, and gathers parameters. With
        megatron.overlap, summing and gathering are hidden behind the backward pass, which takes two thirds of
        a training pass. Only the time by which they are longer counts then.

        states: memory of a trainer rank in each pipeline stage.
        """
        config = self.config
        steps = config.train.ppo_epochs * config.data.train_batch_size // config.train.ppo_mini_batch_size
        state = max(states, key=lambda state: state.optimizer)
        # Bytes of moments and master copy, read and written, then of gradients and parameters.
        moved = 2 * state.optimizer + state.optimizer // 2
        updating = moved / (BANDWIDTH * self.speed.memory)
        if config.optimizer.offload:
            updating += 2 * state.optimizer / (LINKS * self.speed.host)
        reducing = self._reducing()
        if config.megatron.overlap:
            backward = config.train.ppo_epochs * self.seconds(training=True) / steps * 2 / 3
            reducing = max(0.0, reducing - backward)
        return steps * (updating + reducing)

    def mfu(self) -> float:
        promised = self.seconds(training=True) * self.sizes.world_size * self.speed.bf16
        return 3 * self.samples * self.flops.total / promised

    def _rate(self) -> float:
        """Return the data sheet's FLOP/s of one GPU for matrix products in the training precision."""
        fp8 = self.config.megatron.precision == Precision.fp8 and self.speed.fp8
        return self.speed.fp8 if fp8 else self.speed.bf16

    def _forward(self) -> float:
        """Return the seconds to compute a forward pass over all samples, if all ranks have equal work."""
        flops, rate = self.flops, self._rate()
        dense = (flops.projections + flops.mlp) / (PRODUCTS * rate) + flops.head / (
            PRODUCTS * self.speed.bf16
        )
        rest = flops.experts / (EXPERT_PRODUCTS * rate) + self._mixing()
        return self.samples * (dense + rest) / self.sizes.world_size

    def _mixing(self) -> float:
        """Return the seconds of the attention kernel and of the delta rule for one sequence on one GPU.

        The delta rule consists of many small kernels. It takes as long as its FLOPs, or as writing and
        reading what it keeps, whichever is longer.
        """
        found = self.flops.attention / (ATTENTION * self.speed.bf16)
        if self.arch.delta:
            of_a_token = delta_bytes(self.arch.delta, 1, itemsize(self.config.megatron), False)
            kept = self.arch.num_recurrent * self.lengths.sequence * of_a_token
            moving = 2 * kept / (BANDWIDTH * self.speed.memory)
            found += max(self.flops.states / (ATTENTION * self.speed.bf16), moving)
        return found

    def _recomputed(self) -> float:
        """Return the seconds that the backward passes over all samples spend on recomputing activations."""
        flops, rate, modules = self.flops, self._rate(), recomputed_modules(self.config.megatron)
        if self.config.megatron.recompute == Recompute.full:
            return self._forward()
        seconds = self._mixing() if "core_attn" in modules else 0.0
        seconds += flops.mlp / (PRODUCTS * rate) if "mlp" in modules else 0.0
        seconds += flops.experts / (EXPERT_PRODUCTS * rate) if "moe" in modules else 0.0
        return self.samples * seconds / self.sizes.world_size

    def _imbalance(self) -> float:
        """Return the work of the busiest pipeline stage divided by the mean work of all stages.

        The last stage has the output layer. All transformer layers are assumed to be equal.
        """
        layer = (self.flops.total - self.flops.head) / self.arch.num_layers
        work = [layer * kinds.total() for kinds in self.stages]
        work[-1] += self.flops.head
        return max(work) * self.sizes.pp / sum(work)

    def _message(self, size: float, ranks: int) -> float:
        """Return the seconds in which a rank sends `size` bytes, spread over the other ranks of its group.

        ranks: number of neighbouring ranks that the group spans. If this is more than a node has, only the
            bytes to other nodes count, because the network is the slower link.
        """
        per_node = self.config.cluster.gpus_per_node
        if ranks <= per_node:
            return FABRIC_SECONDS + size / (LINKS * self.speed.fabric)
        return NETWORK_SECONDS + size * (1 - per_node / ranks) / (LINKS * self.speed.network)

    def _sent(self, tokens: float) -> float:
        """Return the seconds of all messages in a micro-batch's forward pass, on a rank of the busiest stage.

        Tensor parallel: hidden states are gathered and scattered around attention and around the MLP
            (arXiv:2205.05198 section 4.2).
        Expert parallel: copies of a token go to its experts and back.
        Context parallel: keys and values go around the ring of ranks.
        Pipeline: hidden states go from chunk to chunk.

        tokens: number of tokens of the micro-batch on the rank.
        """
        sizes, arch, width = self.sizes, self.arch, itemsize(self.config.megatron)
        share = 1 / sizes.tp if sizes.sequence_parallel else 1
        hidden = tokens * arch.hidden_size * width
        kinds = max(self.stages, key=Counter.total)
        experts = sum(count for kind, count in kinds.items() if kind.has_experts)
        attention = sum(count for kind, count in kinds.items() if not kind.is_recurrent)
        seconds = 0.0
        if sizes.tp > 1:
            around = (
                4 * (kinds.total() - experts)
                + (4 if arch.moe and arch.moe.shared_ffn_hidden_size else 2) * experts
            )
            seconds += around * self._message(hidden * (sizes.tp - 1) / sizes.tp, sizes.tp)
        parts = sizes.ep * sizes.etp
        if parts > 1:
            copies = arch.moe.top_k * sizes.etp * share * (parts - 1) / parts
            seconds += 2 * experts * self._message(copies * hidden, parts)
        if sizes.cp > 1:
            values = arch.latent.value_dim if arch.latent else arch.head_dim
            heads = arch.num_heads if arch.latent else max(arch.num_kv_heads, sizes.tp)
            keys = tokens * width * heads * (arch.head_dim + values) / sizes.tp
            seconds += attention * (sizes.cp - 1) * self._message(keys, sizes.tp * sizes.cp)
        if sizes.pp > 1:
            seconds += sizes.vpp * self._message(hidden * share, 2 * sizes.world_size // sizes.pp)
        return seconds

    def _reducing(self) -> float:
        """Return the seconds of the collectives over the data-parallel replicas in one optimizer step.

        With the distributed optimizer, gradients are reduce-scattered, and parameters are gathered. Otherwise
        gradients are all-reduced, which takes as long as a reduce-scatter and a gather of gradients.
        """
        sizes, megatron = self.sizes, self.config.megatron
        size = 4 + (itemsize(megatron) if megatron.distributed_optimizer else 4)
        replicas, span = sizes.dp * sizes.cp, sizes.tp * sizes.cp * sizes.dp
        expert_replicas = span // (sizes.ep * sizes.etp)

        def of(stage: tuple[int, int]) -> float:
            plain, experts = stage
            return plain * (replicas - 1) / replicas + experts * (expert_replicas - 1) / expert_replicas

        return self._message(size * max(map(of, stage_elements(self.arch, sizes))), span)
