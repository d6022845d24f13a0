"""Prompt/response pairs for supervised training."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo_megatron.batch.sample import Sample
from grpo_megatron.config.schema import Config
from grpo_megatron.data.lazy import Chain, Made
from grpo_megatron.data.prompts import as_list, record_prompt
from grpo_megatron.data.records import open_records
from grpo_megatron.data.store import Records
from grpo_megatron.data.tokenizer import PromptTokenizer, continued
from grpo_megatron.data.values import required, shown
from grpo_megatron.errors import UserError


def load_examples(config: Config, tokenizer: PromptTokenizer) -> Sequence[Sample]:
    """Prompt/response pairs of all of data.train as samples; every response ends with the end-of-sequence token.

    A response may also be the rest of a chat, such as an episode with an environment: a list of messages that begins and ends with one
    of the assistant. All of the assistant's are trained on.

    Each is made once here, so that whatever is wrong is found before a run starts, and again when it is asked for.
    """
    if tokenizer.tokenizer.eos_token_id is None:
        raise UserError(f"{config.model.path}: the tokenizer has no end-of-sequence token, which must close every response")
    parts, first = [], 0
    for source in as_list(config.data.train):
        records = open_records(source)
        examples = Made(range(len(records)), ExampleMaker(records, tokenizer, config, first), {source: records.digest()})
        for _ in examples:
            pass
        parts.append(examples)
        first += len(examples)
    return Chain(parts)


@dataclass(frozen=True)
class ExampleMaker:
    """Makes the sample of a record by its number. first: number of record 0 among all sources."""

    records: Records
    tokenizer: PromptTokenizer
    config: Config
    first: int

    def __call__(self, number: int) -> Sample:
        """Raises UserError, naming the record, for one that is damaged, incomplete or too long."""
        data, longest = self.config.data, self.config.rollout.max_response_length
        record, where = self.records[number], self.records.where(number)
        _, prompt = self.tokenizer.prompt(record_prompt(record, data, where), where)
        response, mask = self._response(required(record, data.response_key, where), where)
        if len(prompt) > data.max_prompt_length or len(response) > longest:
            raise UserError(
                f"{where} has {len(prompt)} prompt and {len(response)} response tokens, more than "
                f"data.max_prompt_length={data.max_prompt_length} or rollout.max_response_length={longest}"
            )
        return Sample(
            group_id=self.first + number,
            trajectory_id=self.first + number,
            prompt_ids=prompt,
            response_ids=response,
            loss_mask=mask,
            rollout_logprobs=np.zeros(len(response), dtype=np.float32),
            finish_reason="stop",
        )

    def _response(self, given: Any, where: str) -> tuple[np.ndarray, np.ndarray]:
        """(int32 ids, bool mask of what is trained on)."""
        messages = [{"role": "assistant", "content": given}] if isinstance(given, str) else given
        if not _is_rest_of_a_chat(messages):
            raise UserError(
                f"{where}: field {self.config.data.response_key!r} must be a string, or a list of messages with role and content of which "
                f"the first and the last are the assistant's; is {shown(given)}"
            )
        end = self.tokenizer.tokenizer.eos_token_id
        ids, mask, between = [], [], []
        for message in messages:
            if message["role"] != "assistant":
                between.append(message)
                continue
            if ids:
                ids = continued(self.tokenizer, ids, between)
                mask += [False] * (len(ids) - len(mask))
                between = []
            ids += [*self.tokenizer.encode(message["content"]).tolist(), end]
            mask += [True] * (len(ids) - len(mask))
        return np.array(ids, dtype=np.int32), np.array(mask, dtype=np.bool_)


def _is_rest_of_a_chat(messages: Any) -> bool:
    if not isinstance(messages, list) or not messages:
        return False
    if not all(isinstance(message, dict) and isinstance(message.get("content"), str) for message in messages):
        return False
    return messages[0].get("role") == messages[-1].get("role") == "assistant"
