"""An environment for benchmarks/rollout.py, whose episodes have very different lengths."""

from grpo_megatron.rollout.environments import StepResult


class Turns:
    """Lets the model go on for as many turns as the record says, and rewards digits in the last one."""

    def __init__(self, prompt):
        self._left = prompt.fields["turns"]

    async def reset(self, seed):
        return None

    async def step(self, response):
        self._left -= 1
        return StepResult(".", float(response[-1:].isdigit()), self._left == 0)
