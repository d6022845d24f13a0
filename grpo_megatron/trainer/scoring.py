"""Rewards from a reward model that runs on the trainer's ranks."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from grpo_megatron.batch.sample import Conversation, Group, Sample
from grpo_megatron.config.reward import MODEL
from grpo_megatron.config.schema import Config
from grpo_megatron.errors import UserError
from grpo_megatron.model.families import read_architecture
from grpo_megatron.rewards.terms import model_term, terms_of, total
from grpo_megatron.trainer.mini_batch import enough, partition
from grpo_megatron.trainer.policy import PolicyTrainer


class ModelRewards:
    """Sets the rewards of samples to scores of a reward model that runs on the trainer's ranks.

    The reward model scores the conversation of prompt and response, which the rollout worker has put together
    (rollout.reward_model_input). The score is the whole reward (reward.function=model), or one term of
    reward.terms. An object of this class is called with the groups of each step.
    """

    def __init__(self, config: Config, trainer: PolicyTrainer, ranks_turn: Callable[[], None]):
        """Prepare the scoring of samples by a reward model on the trainer's ranks.

        trainer: the trainer whose ranks hold the reward model.
        ranks_turn: function that is called before the ranks are used. The function puts engines that share
            GPUs with the ranks to sleep.
        """
        self._config, self._trainer, self._ranks_turn = config, trainer, ranks_turn
        self._cost = read_architecture(config.reward.model.path).cost_model
        self._terms = terms_of(config.reward)
        self._term = model_term(self._terms)

    def __call__(self, groups: list[Group]) -> list[Group]:
        """Score all samples of the groups. Return copies of the groups whose samples have the new rewards.

        A sample with a failed reward term keeps its reward. The samples in the copies have no conversation
        (input of the reward model) any more, so that the object store can free the conversation's tokens.

        Raises UserError if a score is NaN or infinite.
        """
        self._ranks_turn()
        conversations = [sample.conversation for group in groups for sample in group.samples]
        scores = iter(self._scores(conversations).tolist())
        return [
            replace(group, samples=tuple(self._scored(s, next(scores)) for s in group.samples))
            for group in groups
        ]

    def _scores(self, conversations: list[Conversation]) -> np.ndarray:
        """Return the reward model's scores of S conversations (prompts with responses), float32 [S].

        Raises UserError if a score is not finite.
        """
        given = enough(conversations, self._config)
        plan = partition(self._config, np.array([one.num_tokens for one in given]), self._cost)
        scores = self._trainer.score_stored(plan, [one.handle for one in given])[: len(conversations)]
        bad = np.count_nonzero(~np.isfinite(scores))
        if bad:
            raise UserError(
                f"the reward model {self._config.reward.model.path} scored {bad} of {len(scores)} samples "
                "as NaN or infinity; check the weights of the reward model, and megatron.precision"
            )
        return scores

    def _scored(self, sample: Sample, score: float) -> Sample:
        sample = replace(sample, conversation=None)  # the object store can forget its tokens
        if sample.reward_failed:
            return sample
        components = sample.reward_components | {self._term.name: score}
        name = MODEL if self._term.is_whole else self._term.name
        return sample.scored(total(self._terms, components), sample.reward_components | {name: score})
