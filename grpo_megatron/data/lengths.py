"""Length limits of supervised examples and preference pairs. A response is never cut."""

import numpy as np

from grpo_megatron.config.data import DataConfig, OverlongPrompts


def within_limit(prompt: np.ndarray, data: DataConfig) -> np.ndarray:
    """Return the prompt. With data.overlong_prompts=truncate_left, only its last max_prompt_length tokens."""
    return (
        prompt[-data.max_prompt_length :]
        if data.overlong_prompts == OverlongPrompts.truncate_left
        else prompt
    )


def too_long(prompt: int, response: int, data: DataConfig, longest: int) -> str | None:
    """Return why a pair of prompt and response is too long; None if it is not.

    The text continues a sentence that begins with the place of the record.

    prompt, response: their lengths in tokens.
    longest: maximal length of a response in tokens.
    """
    if prompt <= data.max_prompt_length and response <= longest:
        return None
    return (
        f"has {prompt} prompt and {response} response tokens, more than "
        f"data.max_prompt_length={data.max_prompt_length} or rollout.max_response_length={longest}"
    )
