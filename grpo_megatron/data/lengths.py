"""Length limits of supervised examples and preference pairs. A response is never cut."""

import numpy as np

from grpo_megatron.config.data import DataConfig, OverlongPrompts


def within_limit(prompt: np.ndarray, data: DataConfig) -> np.ndarray:
    """Return the prompt, cut to its last max_prompt_length tokens if data.overlong_prompts=truncate_left.

    prompt: int32 [P], token ids.
    """
    return (
        prompt[-data.max_prompt_length :]
        if data.overlong_prompts == OverlongPrompts.truncate_left
        else prompt
    )


def too_long(prompt_length: int, response_length: int, data: DataConfig, longest: int) -> str | None:
    """Return why a prompt and its response are too long, or None if they are not.

    The result continues a message that begins with the place of the record, such as "has 9 prompt and 3
    response tokens, more than ...".

    prompt_length, response_length: lengths in tokens.
    data: section `data` of the configuration, with the maximum length of a prompt.
    longest: maximum length of a response in tokens.
    """
    if prompt_length <= data.max_prompt_length and response_length <= longest:
        return None
    return (
        f"has {prompt_length} prompt and {response_length} response tokens, more than "
        f"data.max_prompt_length={data.max_prompt_length} or rollout.max_response_length={longest}"
    )
