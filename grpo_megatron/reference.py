"""Log-probs of a step's samples under the reference, computed while other samples are still generated if so configured.

The trainer's ranks wait for the longest responses of a batch anyway. What they compute meanwhile for the finished ones
need not be computed afterwards.
"""

from collections.abc import Callable

import numpy as np

from grpo_megatron.batch import Sample, TrainBatch
from grpo_megatron.cluster.actor_group import ActorGroup, PendingLogprobs
from grpo_megatron.config.schema import Config
from grpo_megatron.megatron.parallel import ParallelSizes
from grpo_megatron.metrics import Mean, Metrics
from grpo_megatron.mini_batch import MiniBatch, partition

# A pass over less than this share of full micro-batches does not pay.
_SMALLEST_PASS = 1 / 8


class Reference:
    """The reference model as the controller asks it, step by step; does nothing where no KL needs it."""

    def __init__(self, config: Config, actor: ActorGroup, keep_hidden: bool):
        """keep_hidden: the ranks keep the reference's hidden states, see ActorGroup.logprobs; not with ref.ahead."""
        self._config, self._actor, self._keep_hidden = config, actor, keep_hidden
        self._used = config.algorithm.needs_reference
        sizes = ParallelSizes.from_config(config.megatron)
        # So many sequences, or a multiple, can always be divided among the replicas' micro-batches.
        self._unit = sizes.dp * sizes.micro_batch_multiple
        self._enough = _SMALLEST_PASS * self._unit * config.train.max_tokens_per_micro_batch * sizes.cp
        self._reset()

    def _reset(self) -> None:
        self._waiting: list[Sample] = []
        self._running: tuple[TrainBatch, PendingLogprobs] | None = None
        self._known: dict[int, np.ndarray] = {}  # trajectory: float32, one per token
        self._tokens = {"ahead": 0, "all": 0}

    def start_step(self) -> Callable[[Sample], None] | None:
        """What is to be called with every sample of the step as soon as it is finished; None: nothing."""
        self._reset()
        return self._finished if self._config.ref.ahead else None

    def _finished(self, sample: Sample) -> None:
        """Sends what waits to the ranks, once these are done with what they were sent before. Raises as they do."""
        self._waiting.append(sample)
        if self._running and self._running[1].ready():
            self._take()
        count = len(self._waiting) // self._unit * self._unit
        if not self._running and count and sum(sample.num_tokens for sample in self._waiting) >= self._enough:
            batch = TrainBatch.from_samples(self._waiting[:count])
            plan = partition(self._config, batch.lengths, self._actor.cost_model)
            self._running = batch, self._actor.start_logprobs(batch, plan, reference=True)
            self._waiting = self._waiting[count:]

    def _take(self) -> None:
        batch, pending = self._running
        self._running = None
        self._know(batch, pending.result())

    def _know(self, batch: TrainBatch, logprobs: np.ndarray) -> None:
        parts = np.split(logprobs, batch.cu_seqlens[1:-1])
        self._known |= dict(zip(batch.trajectory_id.tolist(), parts, strict=True))

    def fill(self, mini: MiniBatch) -> None:
        """Set the mini-batch's ref_logp; computed now where it was not before."""
        if self._used:
            mini.batch.ref_logp = self._logprobs(mini)

    def _logprobs(self, mini: MiniBatch) -> np.ndarray:
        if self._running:
            self._take()
        batch, trajectories = mini.batch, mini.batch.trajectory_id.tolist()
        missing = [i for i, trajectory in enumerate(trajectories) if trajectory not in self._known]
        self._tokens["all"] += batch.num_tokens
        self._tokens["ahead"] += batch.num_tokens - int(batch.lengths[missing].sum())
        again = -len(missing) % self._unit
        if len(missing) + again >= len(trajectories):
            return self._actor.logprobs(batch, mini.plan, reference=True, key=mini.key, keep_hidden=self._keep_hidden)
        if missing:
            rest = batch.select(missing + sorted(set(range(len(trajectories))) - set(missing))[:again])
            plan = partition(self._config, rest.lengths, self._actor.cost_model)
            self._know(rest, self._actor.logprobs(rest, plan, reference=True))
        return np.concatenate([self._known[trajectory] for trajectory in trajectories])

    def metrics(self) -> Metrics:
        """ref/ahead_share: of the step's tokens, those whose log-prob was there before the last sample was."""
        return {"ref/ahead_share": Mean(self._tokens["ahead"], self._tokens["all"])} if self._config.ref.ahead else {}
