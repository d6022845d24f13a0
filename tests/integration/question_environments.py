"""An environment in which untrained models get different rewards. It runs in processes of its own."""

from grpo_megatron.rollout.environments import StepResult, environment


def share_of_digits(text):
    return sum(c.isdigit() for c in text) / max(1, len(text))


@environment("three_questions")
class ThreeQuestions:
    """Appends `(s)` to the prompt, where s is the state, and asks `s?` after the first and second turn,
    like a chat template.
    """

    def __init__(self, prompt):
        self.turns = 0

    async def reset(self, seed):
        self.state = seed % 10
        return f"({self.state})"

    async def step(self, response):
        self.turns += 1
        observation = f"<user>{self.state}?<assistant>"
        return StepResult(observation, share_of_digits(response), self.turns == 3, {"turns": 1})


class Broken(ThreeQuestions):
    async def step(self, response):
        return {}["no such answer"]
