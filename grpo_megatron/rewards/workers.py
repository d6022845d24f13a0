"""Reward workers: processes on all nodes that compute rewards while generation goes on.

This module also decides what happens to a sample whose reward fails.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Sample
from grpo_megatron.cluster.pool_worker import Bounds, Place
from grpo_megatron.cluster.worker_pool import WorkerDied, WorkerHangs, WorkerPool
from grpo_megatron.config.reward import OnFailure, RewardConfig
from grpo_megatron.errors import UserError
from grpo_megatron.logs import Rarely
from grpo_megatron.rewards.base import read_secrets, resolve_rewards
from grpo_megatron.rewards.scoring import Failed, GroupScored, GroupTask, RewardTask, Scored, ScorerSpec
from grpo_megatron.rewards.terms import WHOLE, model_term, terms_of, total

logger = logging.getLogger(__name__)


class RewardWorkers:
    """The driver's handle for the reward workers: processes that decode and score samples.

    A process that dies or hangs is handled like a reward that fails, as reward.on_failure says.
    """

    def __init__(self, config: RewardConfig, decode: Callable[[np.ndarray], str], places: Sequence[Place]):
        """Start the worker processes.

        The reward functions are looked up in this process too, so that a wrong name fails before any process
        starts.

        config: section `reward` of the configuration.
        decode: function from int32 token ids to text. It is pickled and sent to the worker processes.
        places: node, process name and log file of each worker process.

        Raises UserError for an unknown reward function or option, and if an environment variable that a
        reward reads is not set.
        """
        rewards = resolve_rewards(config)
        self._config, self._decode, self._warn = config, decode, Rarely(logger)
        self._of_groups = any(reward.of_group for reward in rewards)
        # The terms are read once: that takes milliseconds, and reading them per sample would block the event
        # loop of all requests.
        self._terms = terms_of(config)
        self._is_whole = model_term(self._terms) is None
        what = "reward " + ", ".join(dict.fromkeys(term.function for term in self._terms))
        spec = ScorerSpec(config, decode, read_secrets(rewards))
        self._pool = WorkerPool(what, spec, bounds(config), places)

    async def score(self, prompt: Prompt, sample: Sample) -> Sample:
        """Score a sample with the rewards of single responses. Return a copy of the sample with the results.

        The copy has the response as text, and the values of the rewards as its reward components. It also has
        the total reward, unless there are group rewards or a reward model, which are computed later.

        If a reward fails, reward.on_failure decides what happens. With `error`, UserError is raised, or its
        subclass ProcessLost if the worker process died. Otherwise, the copy is marked as failed, and has no
        components. ProcessLost is raised in any case if a worker process does not start.
        """
        found = await self._ask(
            RewardTask(prompt.uid, prompt.text, sample.arrays.response_ids, prompt.answer, prompt.fields)
        )
        if isinstance(found, Failed):
            # The worker sends the decoded text. Decode here only if the worker is gone.
            sample = sample.with_texts(found.text or self._decode(sample.arrays.response_ids))
            return self._failed([sample], found)[0]
        sample = replace(sample.with_texts(found.text), reward_components=found.components)
        return sample if self._of_groups else self._total(sample, found.components)

    async def score_group(self, prompt: Prompt, samples: Sequence[Sample]) -> tuple[Sample, ...]:
        """Score the samples of a group with the group rewards. Return all samples of the group.

        The values are added to the samples' reward components. The total reward is set too, unless there is a
        reward model. Samples that are already marked as failed are returned unchanged. Without group rewards,
        all samples are returned unchanged. A failure of a group reward is handled as in `score`, and counts
        for all scored samples of the group.

        prompt: the group's prompt.
        samples: the group's samples, as `score` returned them.
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
                tokens=[sample.num_response for sample in left],
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
        """Return the sample with these reward components, and with the total reward.

        If one reward function is the whole reward, its value is the component `reward`. The sample does not
        get this component, because it equals the total reward. The total reward is not set if there is a
        reward model, because the score of the reward model is not known yet.

        components: {name: value} of all rewards so far.
        """
        shown = {name: value for name, value in components.items() if name != WHOLE}
        if not self._is_whole:
            return replace(sample, reward_components=shown)
        return sample.scored(total(self._terms, components), shown)

    def _failed(self, samples: Sequence[Sample], failed: Failed) -> list[Sample]:
        """Return the samples marked as failed, as reward.on_failure says.

        Their reward is reward.failure_value, or None with reward.on_failure=leave_out. Their reward
        components are removed. A warning is logged.

        samples: samples whose reward failed.
        failed: the failure, with its reason.

        Raises UserError with reward.on_failure=error.
        """
        if self._config.on_failure == OnFailure.error:
            raise UserError(failed.why)
        what = "sample" if len(samples) == 1 else "group"
        if self._config.on_failure == OnFailure.leave_out:
            self._warn(f"{failed.why}; this {what} is left out (reward.on_failure=leave_out)")
            return [replace(sample.scored(None, {}), reward_failed=True) for sample in samples]
        value = self._config.failure_value
        self._warn(f"{failed.why}; the reward of this {what} is reward.failure_value={value}")
        return [replace(sample.scored(value, {}), reward_failed=True) for sample in samples]

    def close(self) -> None:
        self._pool.close()


def bounds(config: RewardConfig) -> Bounds:
    """Return the configured limits of time, memory and file size for worker processes that run user code.

    config: section `reward` of the configuration.
    """
    return Bounds(config.timeout, int(config.memory_gib * 2**30), int(config.file_mib * 2**20))
