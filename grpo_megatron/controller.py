"""The algorithm, on one screen: sample groups, score, weigh, train, sync, log."""

from dataclasses import dataclass

import numpy as np
import torch

from grpo_megatron.algorithm.advantages import group_advantages
from grpo_megatron.algorithm.losses import PolicyLoss, mismatch_metrics
from grpo_megatron.batch import Group, Schedule, TrainBatch, schedule, token_weights
from grpo_megatron.config.schema import Config, OldLogprobs
from grpo_megatron.errors import UserError
from grpo_megatron.metrics import Metrics, merge, nan_max, to_floats
from grpo_megatron.rewards.control import shuffle_rewards

SHOWN = {"reward/mean": "reward", "actor/kl_to_reference": "kl", "actor/entropy": "entropy", "mismatch/max": "mismatch"}


@dataclass
class MiniBatch:
    """The samples of one optimizer step, and their partition, which every pass over them reuses."""

    batch: TrainBatch
    plan: Schedule


class Controller:
    """Holds the algorithm and the counters; everything else is behind its collaborators.

    actor: cluster.ActorGroup. rollouts: rollout.RolloutSource. prompts: data.PromptSource or None
    (replay). evaluation: evaluation.Evaluation or None. saver: checkpoints.Checkpoints.
    """

    def __init__(self, config: Config, actor, rollouts, prompts, evaluation, saver, monitor):
        self.config = config
        self.actor, self.rollouts, self.prompts = actor, rollouts, prompts
        self.evaluation, self.saver, self.monitor = evaluation, saver, monitor
        algorithm = config.algorithm
        self.loss = PolicyLoss(
            clip_ratio_low=algorithm.clip_ratio_low,
            clip_ratio_high=algorithm.clip_ratio_high,
            use_kl_loss=algorithm.use_kl_loss,
            kl_loss_coef=algorithm.kl_loss_coef,
            kl_loss_type=algorithm.kl_loss_type,
            entropy_coeff=algorithm.entropy_coeff,
        )
        self.step = 0
        self.totals = {"tokens": 0, "seconds": 0.0, "mismatch_max": 0.0}

    def run(self) -> dict:
        """Train to run.total_steps; returns evaluation before and after, and totals."""
        self.sync_weights()
        before = after = self.evaluate()
        while self.step < self.config.run.total_steps:
            self.step += 1
            self.train_step()
            last = self.step == self.config.run.total_steps
            if last or (self.config.eval.every and self.step % self.config.eval.every == 0):
                after = self.evaluate()
            if self.saver.due(self.step):
                self.saver.save(self.step, self.actor, self.state_dict())
        return {"before": before, "after": after, **self.totals}

    def train_step(self) -> None:
        config, phases = self.config, self.monitor.phases
        self.monitor.start_step()
        with phases("generate"):
            groups = self.rollouts.groups(self.step, self.prompts)
        if config.reward.shuffle_control:
            groups = shuffle_rewards(groups, np.random.default_rng([config.run.seed, self.step]))
        with phases("prepare"):
            mini_batches = self.prepare(groups)
        with phases("logprobs"):
            mismatch = self.old_and_reference_logprobs(mini_batches)
        with phases("train"):
            current = config.train.old_logprobs == OldLogprobs.current
            trained = [
                self.actor.train_step(mini.batch, mini.plan, self.loss, current)
                for _ in range(config.train.ppo_epochs)
                for mini in mini_batches
            ]
        if any(metrics["actor/dropped_steps"].result() == 0 for metrics in trained):
            with phases("sync"):
                self.sync_weights()
        self.report(groups, mini_batches, trained, mismatch)

    def prepare(self, groups: list[Group]) -> list[MiniBatch]:
        """Flat batches with advantages, token weights and micro-batches, one per optimizer step."""
        config = self.config
        batch = TrainBatch.from_samples([sample for group in groups for sample in group.samples])
        advantages = group_advantages(
            torch.from_numpy(batch.reward), torch.from_numpy(batch.group_id), config.algorithm.norm_adv_by_std_in_grpo
        ).numpy()
        batch.advantage = np.where(batch.loss_mask, advantages[batch.sequence_id], 0).astype(np.float32)
        group_of = np.repeat(np.arange(len(groups)), [len(group.samples) for group in groups])
        mini_batches = []
        for first in range(0, len(groups), config.train.ppo_mini_batch_size):
            chosen = (group_of >= first) & (group_of < first + config.train.ppo_mini_batch_size)
            part = batch.select(np.flatnonzero(chosen))
            part.weight = token_weights(part, config.algorithm.loss_agg_mode, config.rollout.max_response_length)
            plan = schedule(
                part.lengths,
                config.train.max_tokens_per_micro_batch * config.megatron.context_parallel,
                dp=config.megatron.data_parallel,
                hidden_size=self.actor.hidden_size,
                packing=config.train.packing,
            )
            mini_batches.append(MiniBatch(part, plan))
        if config.train.old_logprobs == OldLogprobs.current and len(mini_batches) * config.train.ppo_epochs > 1:
            raise UserError(
                f"train.old_logprobs=current needs one optimizer step per batch; {len(groups)} prompts make several"
            )
        return mini_batches

    def old_and_reference_logprobs(self, mini_batches: list[MiniBatch]) -> Metrics | None:
        """Fill old_logp and ref_logp; the engine's mismatch if the old log-probs were recomputed."""
        mismatch = []
        for mini in mini_batches:
            batch = mini.batch
            if self.config.train.old_logprobs == OldLogprobs.recompute:
                batch.old_logp = self.actor.logprobs(batch, mini.plan)
                arrays = (batch.rollout_logp, batch.old_logp, batch.loss_mask)
                mismatch.append(mismatch_metrics(*map(torch.from_numpy, arrays)))
            elif self.config.train.old_logprobs == OldLogprobs.rollout:
                batch.old_logp = batch.rollout_logp
            if self.config.algorithm.use_kl_loss:
                batch.ref_logp = self.actor.logprobs(batch, mini.plan, reference=True)
        return merge(mismatch) if mismatch else None

    def sync_weights(self) -> None:
        """Current weights into the engines, which tag every sample with the new version."""
        self.rollouts.update_weights(self.actor, self.config.cluster.sync_bucket_bytes)

    def evaluate(self) -> dict[str, float]:
        if self.evaluation is None:
            return {}
        with self.monitor.phases("evaluate"):
            scalars = self.evaluation.run(self.rollouts, self.step)
        self.monitor.log(self.step, scalars)
        self.monitor.say(
            f"evaluation after {self.step} steps: "
            + ", ".join(f"{k.removeprefix('eval/')} {v:.3f}" for k, v in scalars.items())
        )
        return scalars

    def report(self, groups, mini_batches, trained: list[Metrics], mismatch: Metrics | None) -> None:
        # Only the first optimizer step sees the weights the engine sampled with.
        mismatch = mismatch or {name: value for name, value in trained[0].items() if name.startswith("mismatch/")}
        metrics = {name: value for name, value in merge(trained).items() if not name.startswith("mismatch/")}
        scalars = to_floats({**metrics, **mismatch}) | self.rollouts.statistics(groups)
        tokens = sum(mini.batch.num_tokens for mini in mini_batches)
        scalars = self.monitor.finish_step(self.step, scalars, tokens)
        dropped = {"actor/dropped_steps": "DROPPED STEPS"} if scalars["actor/dropped_steps"] else {}
        self.monitor.line(self.step, scalars, SHOWN | dropped)
        self.totals["tokens"] += tokens
        self.totals["seconds"] += scalars["time/step"]
        self.totals["mismatch_max"] = nan_max(self.totals["mismatch_max"], scalars["mismatch/max"])

    def state_dict(self) -> dict:
        prompts = self.prompts.state_dict() if self.prompts else None
        return {"step": self.step, "totals": self.totals, "rollouts": self.rollouts.state_dict(), "prompts": prompts}

    def load_state_dict(self, state: dict) -> None:
        self.step, self.totals = state["step"], state["totals"]
        self.rollouts.load_state_dict(state["rollouts"])
        if self.prompts and state["prompts"]:  # a replayed run has none
            self.prompts.load_state_dict(state["prompts"])
