"""Mean lengths of prompts and responses, for which a step is planned."""

from dataclasses import dataclass

from grpo_megatron.config.schema import Config
from grpo_megatron.errors import UserError


@dataclass(frozen=True)
class Lengths:
    """Mean number of tokens of a prompt and of a response."""

    prompt: float
    response: float

    @classmethod
    def given(cls, config: Config, prompt: float | None = None, response: float | None = None) -> "Lengths":
        """Return the mean lengths that the user gave, or half of the configured maximum where none is given.

        prompt, response: mean number of tokens. None: not given.

        Raises UserError if a mean is not above 0, or if it exceeds the configured maximum.
        """
        most = {"prompt": config.data.max_prompt_length, "response": config.rollout.max_response_length}
        means = {"prompt": prompt, "response": response}
        for name, mean in means.items():
            if mean is not None and not 0 < mean <= most[name]:
                raise UserError(
                    f"the mean {name} length must be above 0 and at most the longest one ({most[name]} "
                    f"tokens), but is {mean:g}"
                )
        return cls(*(most[name] / 2 if mean is None else mean for name, mean in means.items()))

    @property
    def sequence(self) -> float:
        return self.prompt + self.response
