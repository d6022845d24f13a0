"""RolloutManager: prompts in, groups of scored samples out."""

import asyncio
import contextlib
from dataclasses import dataclass

import numpy as np
import ray

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Group, Sample
from grpo_megatron.cluster.processes import fetch, gather
from grpo_megatron.errors import UserError
from grpo_megatron.rollout.client import EngineClient
from grpo_megatron.rollout.episodes import Episode, MultiTurn, SingleTurn
from grpo_megatron.sglang.engine import Completion, Request


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

    def __init__(self, engines: list, who: dict, config, episodes: SingleTurn | MultiTurn):
        """engines, who: of `start_engines`; config: config.schema.RolloutConfig."""
        self._engines = engines
        self._who = who
        self._config = config
        self._episodes = episodes
        self._next_group = 0
        self.weight_version = 0

    def wait_until_ready(self) -> None:
        self._on_all("ready", timeout=self._config.engine.start_timeout)

    def _on_all(self, method: str, *args, timeout: float | None = None) -> dict:
        calls = {index: getattr(engine, method).remote(*args) for index, engine in enumerate(self._engines)}
        return gather(calls, self._who, timeout)

    # -- generation ---------------------------------------------------------------------------

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
        clients = [EngineClient(engine, *self._who[i], self._config) for i, engine in enumerate(self._engines)]
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
        stale = {span.version for span in completion.weight_spans} - {self.weight_version}
        if stale:
            raise StaleWeights(
                f"the engine answered with weight version {sorted(stale)}, the trainer's is {self.weight_version}: "
                "an update did not reach it; see the engine's log"
            )

    def score(self, sequences: list[list[int]]) -> list[np.ndarray]:
        """See SGLangEngine.score; by the first engine."""
        return fetch(self._engines[0].score.remote(sequences), *self._who[0])

    # -- weights ------------------------------------------------------------------------------

    def update_weights(self, buckets, version: int) -> None:
        """Load new weights into all engines; buckets: iterable of references to weights.buckets.Bucket.

        One update session per engine. Samples made from now on carry `version`. Raises if an
        engine refuses any part; its weights are then undefined and the run must end.
        """
        self._on_all("begin_update")
        for bucket in buckets:
            self._on_all("load_bucket", bucket)
        self._on_all("end_update", version)
        self.weight_version = version

    def state_dict(self) -> dict:
        """No sample is kept between steps, so only the counters."""
        return {"next_group": self._next_group, "weight_version": self.weight_version}

    def load_state_dict(self, state: dict) -> None:
        self._next_group, self.weight_version = state["next_group"], state["weight_version"]

    def close(self) -> None:
        for engine in self._engines:
            # Asked first, so that SGLang ends its children; one that is dead already ended them.
            with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
                ray.get(engine.shutdown.remote(), timeout=20)
            ray.kill(engine)
