"""The limits of what is trained on as it was written: examples and preferences. A response is never cut."""

import numpy as np

from grpo_megatron.config.schema import DataConfig, OverlongPrompts


def within_limit(prompt: np.ndarray, data: DataConfig) -> np.ndarray:
    """Return a prompt's last data.max_prompt_length tokens under data.overlong_prompts=truncate_left, else all of it."""
    return (
        prompt[-data.max_prompt_length :]
        if data.overlong_prompts == OverlongPrompts.truncate_left
        else prompt
    )


def too_long(prompt: int, response: int, data: DataConfig, longest: int) -> str | None:
    """Return what is wrong with a prompt and a response of so many tokens, or None. longest: tokens of a response."""
    if prompt <= data.max_prompt_length and response <= longest:
        return None
    return (
        f"has {prompt} prompt and {response} response tokens, more than data.max_prompt_length={data.max_prompt_length} "
        f"or rollout.max_response_length={longest}"
    )
