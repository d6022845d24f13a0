"""Prompt/response pairs for supervised training."""

import numpy as np

from grpo_megatron.batch.sample import Sample
from grpo_megatron.config.schema import Config
from grpo_megatron.data.prompts import PromptTokenizer, as_list, prompt_text
from grpo_megatron.data.records import read_records
from grpo_megatron.errors import UserError


def load_examples(config: Config, tokenizer: PromptTokenizer) -> list[Sample]:
    """Prompt/response pairs as samples; every response ends with the end-of-sequence token."""
    data = config.data
    end = tokenizer.tokenizer.eos_token_id
    if end is None:
        raise UserError(f"{config.model.path}: the tokenizer has no end-of-sequence token, which must close every response")
    examples = []
    longest = config.rollout.max_response_length
    records = [
        (f"{source}: record {number}", record)
        for source in as_list(data.train)
        for number, record in enumerate(read_records(source, [data.prompt_key, data.response_key]))
    ]
    for number, (where, record) in enumerate(records):
        prompt = tokenizer.encode(prompt_text(record, tokenizer, data, where))
        if not isinstance(record[data.response_key], str):
            raise UserError(
                f"{where}: field {data.response_key!r} must be a string, is {str(record[data.response_key])[:60]!r}"
            )
        response = np.append(tokenizer.encode(record[data.response_key]), np.int32(end))
        if len(prompt) > data.max_prompt_length or len(response) > longest:
            raise UserError(
                f"{where} has {len(prompt)} prompt and {len(response)} response tokens, more than "
                f"data.max_prompt_length={data.max_prompt_length} or rollout.max_response_length={longest}"
            )
        examples.append(
            Sample(
                group_id=number,
                trajectory_id=number,
                prompt_ids=prompt,
                response_ids=response,
                loss_mask=np.ones(len(response), dtype=np.bool_),
                rollout_logprobs=np.zeros(len(response), dtype=np.float32),
                finish_reason="stop",
            )
        )
    return examples
