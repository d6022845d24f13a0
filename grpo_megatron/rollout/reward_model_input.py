"""RewardModelInput: what a reward model on the trainer's ranks reads of a prompt and a response."""

import numpy as np

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Conversation, Sample
from grpo_megatron.config.derived import pack_limit
from grpo_megatron.config.schema import Config
from grpo_megatron.data.conversations import conversations_of, same_tokenizer
from grpo_megatron.data.template_choice import NO_TEMPLATE
from grpo_megatron.errors import UserError
from grpo_megatron.model.families import read_architecture


class RewardModelInput:
    """Puts together the conversations of prompt and response that a reward model reads.

    If reward model and policy have the same tokenizer, the reward model reads the sampled token ids.
    Otherwise the texts of prompt and response are encoded again, with the reward model's tokenizer and chat
    template. In both cases, the tokens with which the chat template ends a conversation are appended.
    """

    def __init__(self, config: Config):
        """Load the tokenizer and chat template of the reward model in config.reward.model.path.

        Raises UserError if the tokenizer or chat template is missing.
        """
        path, policy = config.reward.model.path, config.model.path
        self._conversations = conversations_of(path, policy, config.data)
        self._keeps_ids = same_tokenizer(path, policy)
        self._has_template = config.data.chat_template != NO_TEMPLATE
        self._longest = min(read_architecture(path).longest_within_windows, pack_limit(config))

    def conversation(self, prompt: Prompt, sample: Sample) -> Conversation:
        """Return the conversation of a prompt and a response, with the token ids that the reward model reads.

        If the conversation is longer than the reward model or a micro-batch allows, its first tokens are cut
        off.

        Raises UserError if the prompt was given as token ids, the reward model has another tokenizer, and
        data.chat_template is not none.
        """
        prompt_ids, response_ids = sample.arrays.prompt_ids, sample.arrays.response_ids
        if not self._keeps_ids:
            where = f"record {prompt.uid}"
            if prompt.messages is None and self._has_template:
                raise UserError(
                    f"{where}: the prompt consists of token ids, which a reward model with a different "
                    "tokenizer cannot read; give the prompt as text or messages"
                )
            tokenizer = self._conversations.tokenizer
            tools = prompt.tools if tokenizer.template and tokenizer.template.shows_tools else None
            _, prompt_ids = tokenizer.prompt(prompt.messages or prompt.text, where, tools)
            response_ids = tokenizer.encode(sample.response_text)
        whole = np.concatenate([prompt_ids, self._conversations.finished(response_ids)])
        return Conversation.of(whole[-self._longest :])
