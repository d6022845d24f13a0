"""RolloutManager: prompts in, groups of scored samples out."""

import asyncio
from dataclasses import dataclass

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Group, Sample
from grpo_megatron.errors import UserError
from grpo_megatron.rollout.episodes import Episode, MultiTurn, SingleTurn
from grpo_megatron.sglang.client import EngineClient
from grpo_megatron.sglang.engine import Completion, Request
from grpo_megatron.sglang.pool import EnginePool


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn. temperature 0: greedy."""

    n: int
    temperature: float
    max_response_length: int
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    top_p: float = 1.0  # below 1 only where nothing is trained on the samples
    same_states: bool = False  # a prompt's environments begin alike in every call, not anew

    def parameters(self) -> dict:
        """SGLang's sampling parameters but max_new_tokens, which is what is left to a turn."""
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": -1,
            "stop": list(self.stop),
            "stop_token_ids": list(self.stop_token_ids),
        }


class StaleWeights(UserError):
    """An engine generated with other weights than the trainer's newest."""


class RolloutManager:
    """Plays episodes on the engines, all at once, and puts groups together again."""

    def __init__(self, engines: EnginePool, episodes: SingleTurn | MultiTurn):
        self._engines = engines
        self._episodes = episodes
        self._next_group = 0

    def generate(self, prompts: list[Prompt], sampling: Sampling) -> list[Group]:
        """`sampling.n` scored samples for each prompt, groups in the order of the prompts.

        Blocks until all are done. Raises UserError if an engine dies or finishes nothing for
        rollout.engine.request_timeout seconds, or as a reward or an environment does.
        """
        samples = asyncio.run(self._generate(prompts, sampling))
        groups = [
            Group(self._next_group + p, prompt, tuple(samples[p * sampling.n : (p + 1) * sampling.n]))
            for p, prompt in enumerate(prompts)
        ]
        self._next_group += len(prompts)
        return groups

    async def _generate(self, prompts: list[Prompt], sampling: Sampling) -> list[Sample]:
        # Samples of one group go to one engine, whose prefix cache then holds the prompt.
        clients = self._engines.clients()
        keys = [(p, s) for p in range(len(prompts)) for s in range(sampling.n)]
        return await asyncio.gather(*(self._play(prompts[p], (p, s), sampling, clients[p % len(clients)]) for p, s in keys))

    async def _play(self, prompt: Prompt, key: tuple[int, int], sampling: Sampling, client: EngineClient) -> Sample:
        group = self._next_group + key[0]
        prompt_ids, parameters = prompt.ids.tolist(), sampling.parameters()

        async def respond(ids: list[int], most: int) -> Completion:
            completion = await client.generate(Request(key, prompt_ids + ids, parameters | {"max_new_tokens": most}))
            self._check(completion, prompt)
            return completion

        episode = Episode(
            prompt=prompt,
            group_id=group,
            trajectory_id=group * sampling.n + key[1],
            limit=sampling.max_response_length,
            state=(1, prompt.uid) if sampling.same_states else (0, group),
        )
        return await self._episodes.play(episode, respond)

    def _check(self, completion: Completion, prompt: Prompt) -> None:
        if completion.finish_reason == "abort":
            raise UserError(f"the engine aborted a request (prompt record {prompt.uid}); see the engine's log")
        stale = {span.version for span in completion.weight_spans} - {self._engines.weight_version}
        if stale:
            raise StaleWeights(
                f"the engine answered with weight version {sorted(stale)}, the trainer's is {self._engines.weight_version}: "
                "an update did not reach it; see the engine's log"
            )

    def state_dict(self) -> dict:
        """No sample is kept between steps, so only the counter."""
        return {"next_group": self._next_group}

    def load_state_dict(self, state: dict) -> None:
        self._next_group = state["next_group"]
