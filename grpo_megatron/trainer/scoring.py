"""Rewards from a reward model that runs on the trainer's ranks."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from grpo_megatron.batch.arrays import reading
from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Group, Sample
from grpo_megatron.batch.token_stream import TokenStream
from grpo_megatron.config.derived import pack_limit
from grpo_megatron.config.reward import MODEL
from grpo_megatron.config.schema import Config
from grpo_megatron.data.conversations import Conversations, same_tokenizer
from grpo_megatron.data.template_choice import NO_TEMPLATE
from grpo_megatron.errors import UserError
from grpo_megatron.model.families import read_architecture
from grpo_megatron.rewards.terms import model_term, terms_of, total
from grpo_megatron.trainer.mini_batch import enough, partition
from grpo_megatron.trainer.policy import PolicyTrainer


class ModelRewards:
    """Sets the rewards of samples to scores of a reward model that runs on the trainer's ranks.

    The reward model scores the conversation of prompt and response. The score is the sample's whole reward,
    or one term of a reward with several terms.

    If reward model and policy have the same tokenizer, the reward model reads the sampled token ids.
    Otherwise the texts of prompt and response are encoded again, with the reward model's tokenizer and chat
    template. In both cases, the tokens with which the chat template ends a conversation are appended.
    """

    def __init__(
        self,
        config: Config,
        trainer: PolicyTrainer,
        conversations: Conversations,
        ranks_turn: Callable[[], None],
    ):
        """Prepare the scoring of samples.

        trainer: the trainer whose ranks hold the reward model.
        conversations: tokenizer and chat template of the reward model.
        ranks_turn: function that is called before the ranks are used. The function puts engines that share
            GPUs with the ranks to sleep.
        """
        self._config, self._trainer, self._ranks_turn = config, trainer, ranks_turn
        path = config.reward.model.path
        arch = read_architecture(path)
        self._cost, self._longest = arch.cost_model, min(arch.max_positions, pack_limit(config))
        self._keeps_ids = same_tokenizer(path, config.model.path)
        self._conversations, self._terms = conversations, terms_of(config.reward)
        self._term = model_term(self._terms)

    def __call__(self, groups: list[Group]) -> list[Group]:
        """Return copies of the groups whose samples have rewards from the reward model.

        Samples whose other reward terms failed are returned unchanged. Raises UserError if a score is NaN or
        infinite.
        """
        self._ranks_turn()
        with reading(allowed=True):  # the conversations are put together in the driver
            read = [self._as_read(group.prompt, sample) for group in groups for sample in group.samples]
            scores = iter(self._scores(read).tolist())
        return [
            replace(group, samples=tuple(self._scored(s, next(scores)) for s in group.samples))
            for group in groups
        ]

    def _as_read(self, prompt: Prompt, sample: Sample) -> np.ndarray:
        """Return the token ids of the sample that the reward model reads, int32 [n].

        If the conversation is longer than the reward model or a micro-batch allows, its first tokens are cut
        off.
        """
        prompt_ids, response_ids = sample.arrays.prompt_ids, sample.arrays.response_ids
        if not self._keeps_ids:
            where = f"record {prompt.uid}"
            if prompt.messages is None and self._config.data.chat_template != NO_TEMPLATE:
                raise UserError(
                    f"{where}: the prompt consists of token ids, which a reward model with a different "
                    "tokenizer cannot read; give the prompt as text or messages"
                )
            tokenizer = self._conversations.tokenizer
            tools = prompt.tools if tokenizer.template and tokenizer.template.shows_tools else None
            _, prompt_ids = tokenizer.prompt(prompt.messages or prompt.text, where, tools)
            response_ids = self._conversations.tokenizer.encode(sample.response_text)
        return np.concatenate([prompt_ids, self._conversations.finished(response_ids)])[-self._longest :]

    def _scores(self, samples: list[np.ndarray]) -> np.ndarray:
        """Return the reward model's scores of the S samples, float32 [S].

        samples: the token ids of each sample, from `_as_read`.
        Raises UserError if a score is not finite.
        """
        sequences = enough(samples, self._config)
        plan = partition(self._config, np.array([len(ids) for ids in sequences]), self._cost)

        def make(part: Sequence[int]) -> TokenStream:
            return TokenStream.of([sequences[i] for i in part])

        scores = self._trainer.scores(plan, make)[: len(samples)]
        bad = np.count_nonzero(~np.isfinite(scores))
        if bad:
            raise UserError(
                f"the reward model {self._config.reward.model.path} scored {bad} of {len(samples)} samples "
                "as NaN or infinity; check the weights of the reward model, and megatron.precision"
            )
        return scores

    def _scored(self, sample: Sample, score: float) -> Sample:
        if sample.reward_failed:
            return sample
        components = sample.reward_components | {self._term.name: score}
        name = MODEL if self._term.is_whole else self._term.name
        return sample.scored(total(self._terms, components), sample.reward_components | {name: score})
