"""Prompt/response pairs for supervised training."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grpo_megatron.batch.sample import Sample
from grpo_megatron.config.schema import Config
from grpo_megatron.data.lazy import Chain, Made
from grpo_megatron.data.prompts import as_list, record_prompt, record_tools
from grpo_megatron.data.records import open_records
from grpo_megatron.data.store import Records
from grpo_megatron.data.tokenizer import PromptTokenizer
from grpo_megatron.data.turns import Asked, written
from grpo_megatron.data.values import required
from grpo_megatron.errors import UserError


def load_examples(config: Config, tokenizer: PromptTokenizer) -> Sequence[Sample]:
    """Return the prompt/response pairs of all of data.train as samples.

    Every response ends as the chat template ends a turn of the assistant; if the template has no token for
    that, with the tokenizer's end token. A response may also be the rest of a chat, such as an episode with
    an environment: a list of messages that begins and ends with one of the assistant. All messages of the
    assistant are trained on.

    Each is made once here, so that whatever is wrong is found before a run starts, and again when it is asked for.
    """
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
        given, tools = record_prompt(self.records, record, data, where), record_tools(self.records, record, data, where)
        text, prompt = self.tokenizer.prompt(given, where, tools)
        asked = Asked(text, self.tokenizer.messages(given, where), tools)
        answer = self.records.meant(required(record, data.response_key, where))
        response, mask = written(self.tokenizer, asked, answer, f"{where}: field {data.response_key!r}")
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
