"""RolloutManager: generates groups of scored samples from prompts."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Group
from grpo_megatron.config.rollout import RolloutConfig, Strategy
from grpo_megatron.errors import UserError
from grpo_megatron.rollout.beam import BeamSearch, run_search
from grpo_megatron.rollout.episodes import MultiTurn, SingleTurn
from grpo_megatron.rollout.trajectory import Episode
from grpo_megatron.sglang.client import EngineClient
from grpo_megatron.sglang.pool import EnginePool
from grpo_megatron.sglang.request import Completion, Request


def sampling_parameters(rollout: RolloutConfig) -> dict:
    """Return SGLang's sampling parameters by name, except max_new_tokens, which each turn sets."""
    return {
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "stop": rollout.stop,
        "stop_token_ids": rollout.stop_token_ids,
    }


@dataclass(frozen=True)
class Goal:
    """Number of groups that `RolloutManager.fill` should return, and limits for it (dynamic sampling)."""

    groups: int
    """Number of groups that fill the batch."""
    in_flight: float
    """Number of groups to generate at the same time, divided by the number that the batch still lacks."""
    most: int
    """Maximum number of prompts to use."""


@dataclass
class Filled:
    """The result of `RolloutManager.fill`: groups for a batch, and prompts that are not in the batch."""

    groups: list[Group] = field(default_factory=list)
    """Groups that `keep` accepted, at most Goal.groups."""
    dropped: list[Prompt] = field(default_factory=list)
    """Prompts of the groups that `keep` refused."""
    aborted: list[Group] = field(default_factory=list)
    """Groups that were not needed, because the batch was full before they were done. Most lack samples."""


class StaleWeights(UserError):
    """An engine generated tokens with other weights than the trainer's newest weights."""


class RolloutManager:
    """Generates and scores samples on the engines, all of them concurrently, and groups them by prompt."""

    def __init__(self, engines: EnginePool, episodes: SingleTurn | MultiTurn, turn_ends: Sequence[int] = ()):
        """Create a manager.

        engines: generate the turns of the model.
        episodes: plays the episodes and scores them.
        turn_ends: ids of tokens that end a turn of the model, in addition to the end tokens in the model's
            files, which the engines know.
        """
        self._engines, self._episodes, self._turn_ends = engines, episodes, frozenset(turn_ends)
        self._next_group = 0

    def generate(
        self, prompts: list[Prompt], rollout: RolloutConfig, same_states: bool = False
    ) -> list[Group]:
        """Return `rollout.n` scored samples for each prompt, as groups in the order of the prompts.

        same_states: if True, an environment's initial state depends only on the prompt, so that evaluations
            are alike.

        With reward.on_failure=leave_out, failed samples are left out of their group, which may become empty.

        Raises UserError if an engine dies, or finishes no request for rollout.engine.request_timeout seconds.
        Raises the errors of rewards and environments.
        """
        groups = asyncio.run(self._generate(prompts, rollout, same_states))
        self._next_group += len(prompts)
        return groups

    async def _generate(
        self, prompts: list[Prompt], rollout: RolloutConfig, same_states: bool
    ) -> list[Group]:
        clients = self._engines.clients()
        return await asyncio.gather(
            *(self._group(prompt, p, rollout, clients, same_states) for p, prompt in enumerate(prompts))
        )

    def fill(
        self,
        draw: Callable[[int], list[Prompt]],
        keep: Callable[[Group], bool],
        rollout: RolloutConfig,
        goal: Goal,
    ) -> Filled:
        """Generate groups until `keep` has accepted `goal.groups` of them, or `goal.most` prompts are used.

        This is dynamic sampling. The accepted groups are returned in the order of their prompts.

        draw: function that returns the next prompts. Its argument is the number of prompts.
        keep: function that returns True to accept a group for the batch. It is called when a group is done.
        goal: size of the batch and limits.

        Raises UserError if an engine dies, or finishes no request for rollout.engine.request_timeout seconds.
        """
        return asyncio.run(self._fill(draw, keep, rollout, goal))

    async def _fill(self, draw, keep, rollout: RolloutConfig, goal: Goal) -> Filled:
        clients, filled, asked = self._engines.clients(), Filled(), 0
        running: dict[asyncio.Task[Group], Group] = {}  # to a group that has no samples yet
        try:
            while len(filled.groups) < goal.groups:
                wanted = math.ceil((goal.groups - len(filled.groups)) * goal.in_flight) - len(running)
                for prompt in draw(min(max(wanted, 0), goal.most - asked)):
                    task = asyncio.create_task(self._group(prompt, asked, rollout, clients))
                    running[task] = Group(self._next_group + asked, prompt, ())
                    asked += 1
                if not running:
                    break
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for group in sorted((task.result() for task in done), key=lambda group: group.group_id):
                    full = len(filled.groups) == goal.groups
                    if full:
                        filled.aborted.append(group)
                    elif keep(group):
                        filled.groups.append(group)
                    else:
                        filled.dropped.append(group.prompt)
                for task in done:
                    del running[task]
        finally:
            # Do this even if one task failed, so that the errors of the others are retrieved too.
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        if running:
            await asyncio.gather(*(client.abort() for client in clients))
        filled.aborted += running.values()
        filled.groups.sort(key=lambda group: group.group_id)
        self._next_group += asked
        return filled

    async def _group(
        self,
        prompt: Prompt,
        index: int,
        rollout: RolloutConfig,
        clients: list[EngineClient],
        same_states: bool = False,
    ) -> Group:
        """Generate and score the samples of one prompt, and return them as a group.

        index: index of the group within this call of `generate` or `fill`. It also selects the engine.
        clients: a client of each engine.
        """
        # All samples of a group go to one engine, whose prefix cache then holds the prompt.
        client = clients[index % len(clients)]
        stops = self._turn_ends.union(rollout.stop_token_ids)
        parameters = sampling_parameters(rollout) | {"stop_token_ids": sorted(stops)}

        async def ask(member: int, ids: list[int], most: int, routed: int = 0, top: int = 0) -> Completion:
            request = Request(
                (index, member), ids, parameters | {"max_new_tokens": most}, routed=routed, top=top
            )
            completion = await client.generate(request)
            self._check(completion, prompt)
            return completion

        if rollout.strategy == Strategy.beam:
            ends = client.end_ids | stops
            search = BeamSearch(rollout.n, ends, rollout.max_response_length, rollout.beam)
            asked = prompt.ids.tolist()
            await run_search(search, lambda beam, ids, top: ask(beam, asked + ids, 1, top=top))
            responds = [partial(_found, completion) for completion in search.completions(index)]
        else:
            responds = [partial(ask, member) for member in range(rollout.n)]
        group_id = self._next_group + index
        state = (1, prompt.uid) if same_states else (0, group_id)
        episodes = (
            Episode(prompt, group_id, group_id * rollout.n + member, rollout.max_response_length, state)
            for member in range(len(responds))
        )
        played = map(self._episodes.play, episodes, responds)
        samples = await self._episodes.complete(prompt, tuple(chain(*await asyncio.gather(*played))))
        group = Group(group_id, prompt, samples)
        return replace(group, failed=rollout.n - len(group.trajectories))

    def _check(self, completion: Completion, prompt: Prompt) -> None:
        """Raise UserError if the engine aborted the request.

        Raise StaleWeights if the engine generated with other weights than the trainer's newest weights.
        """
        if completion.finish_reason == "abort":
            raise UserError(
                f"the engine aborted a request (prompt record {prompt.uid}); see the engine's log"
            )
        stale = {span.version for span in completion.weight_spans} - {self._engines.weight_version}
        if stale:
            raise StaleWeights(
                f"the engine answered with weight version {sorted(stale)}, but the trainer has version "
                f"{self._engines.weight_version}: a weight update did not reach the engine; see the engine's "
                "log"
            )

    def state_dict(self) -> dict:
        """Return {"next_group": id of the next group}, for checkpoints."""
        return {"next_group": self._next_group}

    def load_state_dict(self, state: dict) -> None:
        self._next_group = state["next_group"]


async def _found(completion: Completion, ids: list[int], most: int, routed: int = 0) -> Completion:
    """Return `completion`, which a beam search has already found. The engine is not asked.

    The other parameters are unused. They exist because a `Respond` function has them.
    """
    return completion
