"""Reward workers: processes on all nodes that compute rewards while generation goes on.

This module also decides what happens to a sample whose reward fails.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Sample
from grpo_megatron.cluster.pool_worker import Bounds, Place
from grpo_megatron.cluster.worker_pool import WorkerDied, WorkerHangs, WorkerPool
from grpo_megatron.config.reward import OnFailure, RewardConfig
from grpo_megatron.errors import UserError
from grpo_megatron.monitoring.terminal import Rarely
from grpo_megatron.rewards.base import read_secrets, resolve_rewards
from grpo_megatron.rewards.scoring import Failed, GroupScored, GroupTask, RewardTask, Scored, ScorerSpec
from grpo_megatron.rewards.terms import WHOLE, model_term, terms_of, total


class RewardWorkers:
    """The worker processes that score samples and decode their texts.

    The reward functions are first resolved in this process, so that a wrong name fails before any work is
    done.
    """

    def __init__(self, config: RewardConfig, decode: Callable[[np.ndarray], str], places: Sequence[Place]):
        """Start the workers.

        decode: function from int32 ids to text, sent to the workers.
        places: places of the workers.

        Raises UserError as resolve_rewards and read_secrets do.
        """
        rewards = resolve_rewards(config)
        self._config, self._decode, self._say = config, decode, Rarely()
        self._of_groups = any(reward.of_group for reward in rewards)
        # The terms are read once: that takes milliseconds, and reading them per sample would block the event
        # loop of all requests.
        self._terms = terms_of(config)
        self._is_whole = model_term(self._terms) is None
        what = "reward " + ", ".join(dict.fromkeys(term.function for term in self._terms))
        spec = ScorerSpec(config, decode, read_secrets(rewards))
        self._pool = WorkerPool(what, spec, bounds(config), places)

    async def score(self, prompt: Prompt, sample: Sample) -> Sample:
        """Return the sample with its text and the components of the single-response rewards.

        It also gets its reward, unless there are group rewards or a reward model, which are computed later. A
        failure has the effect that reward.on_failure names. If that is `error`, raises UserError for a reward
        that failed, or ProcessLost if its process died.
        """
        found = await self._ask(
            RewardTask(prompt.uid, prompt.text, sample.response_ids, prompt.answer, prompt.fields)
        )
        if isinstance(found, Failed):
            # The worker sends the decoded text. Decode here only if the worker is gone.
            sample = replace(sample, response_text=found.text or self._decode(sample.response_ids))
            return self._failed([sample], found)[0]
        sample = replace(sample, response_text=found.text, reward_components=found.components)
        return sample if self._of_groups else self._total(sample, found.components)

    async def score_group(self, prompt: Prompt, samples: Sequence[Sample]) -> tuple[Sample, ...]:
        """Return all samples of a group with their rewards.

        The samples come from `score`. Raises as `score` does.
        """
        left = [sample for sample in samples if not sample.reward_failed]
        if not self._of_groups or not left:
            return tuple(samples)
        found = await self._ask(
            GroupTask(
                uid=prompt.uid,
                prompt=prompt.text,
                responses=[sample.response_text for sample in left],
                answer=prompt.answer,
                record=prompt.fields,
                tokens=[len(sample.response_ids) for sample in left],
                components=[sample.reward_components for sample in left],
            )
        )
        if isinstance(found, Failed):
            scored = iter(self._failed(left, found))
        else:
            values = ({name: own[i] for name, own in found.values.items()} for i in range(len(left)))
            scored = (
                self._total(one, one.reward_components | own) for one, own in zip(left, values, strict=True)
            )
        return tuple(sample if sample.reward_failed else next(scored) for sample in samples)

    async def _ask(self, task: RewardTask | GroupTask) -> Scored | GroupScored | Failed:
        try:
            return await self._pool.call(task)
        except (WorkerDied, WorkerHangs) as error:
            if self._config.on_failure == OnFailure.error:
                raise
            return Failed(f"{error} (record {task.uid})")

    def _total(self, sample: Sample, components: Mapping[str, float]) -> Sample:
        shown = {name: value for name, value in components.items() if name != WHOLE}
        if not self._is_whole:
            return replace(sample, reward_components=shown)
        return sample.scored(total(self._terms, components), shown)

    def _failed(self, samples: Sequence[Sample], failed: Failed) -> list[Sample]:
        if self._config.on_failure == OnFailure.error:
            raise UserError(failed.why)
        what = "sample" if len(samples) == 1 else "group"
        if self._config.on_failure == OnFailure.leave_out:
            self._say(f"{failed.why}; this {what} is left out (reward.on_failure=leave_out)")
            return [replace(sample.scored(None, {}), reward_failed=True) for sample in samples]
        value = self._config.failure_value
        self._say(f"{failed.why}; the reward of this {what} is reward.failure_value={value}")
        return [replace(sample.scored(value, {}), reward_failed=True) for sample in samples]

    def close(self) -> None:
        self._pool.close()


def bounds(config: RewardConfig) -> Bounds:
    return Bounds(config.timeout, int(config.memory_gib * 2**30), int(config.file_mib * 2**20))
