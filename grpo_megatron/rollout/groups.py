"""GroupSampler: generates and scores the samples of one prompt, with requests to the engines."""

from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import chain

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Sample
from grpo_megatron.cluster.concurrency import all_ended, together
from grpo_megatron.cluster.processes import ProcessDied
from grpo_megatron.cluster.rounds import RoundId
from grpo_megatron.config.rollout import OnUpdate, RolloutConfig, Strategy
from grpo_megatron.errors import ProcessLost, UserError
from grpo_megatron.rollout.beam import BeamSearch, run_search
from grpo_megatron.rollout.episodes import EpisodePlayer
from grpo_megatron.rollout.played_group import Listener, PlayedGroup
from grpo_megatron.rollout.trajectory import Episode, Respond
from grpo_megatron.sglang.client import EngineClient, EngineConnection
from grpo_megatron.sglang.request import Completion, Request
from grpo_megatron.sglang.response_log import ResponseLog


class EngineLost(ProcessDied):
    """An engine died while it generated a group. The group can go on with another engine."""


class StaleWeights(UserError):
    """An engine generated tokens with another version of the weights than the trainer's newest one."""


class Caller(str, Enum):
    """Purposes for which groups are sampled. Each purpose has at most one round (set of groups) at a time."""

    train = "train"
    evaluate = "evaluate"
    evaluate_beside = "evaluate beside training"


@dataclass(frozen=True)
class Round:
    """The settings of a round, which are the same for all its groups.

    A round is a set of groups that are sampled concurrently for one caller, such as those of an evaluation.
    When a round ends, workers and engines cancel those of its groups that are not finished.
    """

    id: RoundId
    """Caller and number of the round. Workers and engines keep rounds with different ids apart."""
    rollout: RolloutConfig
    """Settings of the sampling, such as rollout.n."""
    end_ids: frozenset[int]
    """Ids of the tokens that end a response, from the model's files."""
    over_updates: bool = False
    """True if the engines may get new weights during the round."""

    @property
    def same_states(self) -> bool:
        """True if, in this round, an environment's initial state depends only on the prompt.

        This is the case in evaluations, so that evaluations at different steps are comparable. In training,
        each group begins in another state.
        """
        return self.id.caller in (Caller.evaluate, Caller.evaluate_beside)


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """A request to sample one group."""

    key: int
    """Number of the request within the round."""
    group_id: int
    """Id of the group within the run."""
    engine: int
    """Index of the engine that generates all samples of the group, so that its prefix cache holds the prompt.
    If the engine of an earlier request for the group was lost, this one generates the rest."""
    prompt: Prompt
    """The group's prompt."""
    weight_version: int = 0
    """Version of the newest weights when the group was started."""


def sampling_parameters(rollout: RolloutConfig) -> dict:
    """Return SGLang's sampling parameters as {name: value}, without max_new_tokens, which each turn sets."""
    return {
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "stop": rollout.stop,
        "stop_token_ids": rollout.stop_token_ids,
    }


class GroupSampler:
    """Samples groups: plays the episodes of each group concurrently, and has the samples scored.

    A round is a set of groups that are sampled concurrently. It consists of `begin`, calls of `sample` for
    its groups, and `end`. All calls for a round must be made in the same event loop. Rounds of different
    callers, such as training and evaluation, may be in progress at the same time.
    """

    def __init__(
        self,
        connections: Mapping[int, EngineConnection],
        episodes: EpisodePlayer,
        turn_ends: frozenset[int],
    ):
        """Create a sampler of groups.

        connections: {index of an engine: connection over which it gets requests}.
        episodes: plays the episodes and has them scored.
        turn_ends: ids of tokens that end a turn of the model, in addition to those that each Round names.
        """
        self._connections, self._episodes, self._turn_ends = dict(connections), episodes, turn_ends
        self._rounds: dict[RoundId, _OpenRound] = {}
        self._limits: defaultdict[str, dict[int, int]] = defaultdict(dict)  # of each caller, see _OpenRound

    async def begin(self, round: Round) -> None:
        """Begin a round. If an older round of the same caller has not been ended, end it."""
        older = [other for other in self._rounds if other.caller == round.id.caller]
        self._rounds[round.id] = _OpenRound(round, self._connections, self._limits[round.id.caller])
        for other in older:
            await self.end(other)

    async def end(self, round: RoundId) -> None:
        """End a round and its requests on the engines. Does nothing if the round is unknown or has ended.

        Calls of `sample` for the round must have been cancelled before.
        """
        if found := self._rounds.pop(round, None):
            await found.end()

    def connect(self, engine: int, connection: EngineConnection) -> None:
        """Send later requests for an engine over a new connection, in all rounds.

        This is necessary when a new process has replaced the engine's process, or when an engine has joined.

        engine: index of the engine.
        """
        self._connections[engine] = connection
        for limits in self._limits.values():
            limits.pop(engine, None)
        for opened in self._rounds.values():
            opened.clients.pop(engine, None)

    async def sample(self, round: RoundId, request: GroupRequest, listener: Listener) -> tuple[Sample, ...]:
        """Sample a group, and return its scored samples.

        With reward.on_failure=leave_out, samples whose reward or environment failed are left out.

        round: id of a round that has begun.
        request: the prompt, the engine, and the ids of the group.
        listener: gets a report on what is left of the group when one of its samples has ended.

        Raises EngineLost if the engine dies. A second call for the group, with another engine, then continues
        it: the episodes keep their state, and responses go on after the tokens that the lost engine reported.
        Raises UserError if the engine finishes no request for rollout.engine.request_timeout seconds, and
        StaleWeights if it uses old weights. Raises the errors of rewards and environments.
        """
        opened = self._rounds[round]
        group = opened.without_engine.pop(request.group_id, None)
        if group is None:
            group = PlayedGroup(lambda group: self._play(opened, request, group))
        try:
            return await group.run_on(request.engine, listener)
        except EngineLost:
            opened.without_engine[request.group_id] = group
            raise

    async def _play(
        self, opened: "_OpenRound", request: GroupRequest, group: PlayedGroup
    ) -> tuple[Sample, ...]:
        """Play and score the episodes of a group, with requests to its engine. Return the scored samples.

        opened: the round that the group belongs to.
        group: tells which engine has the group now, and waits for another one if this engine is lost.
        """
        this = opened.round
        prompt, rollout = request.prompt, this.rollout
        stops = self._turn_ends.union(rollout.stop_token_ids)
        parameters = sampling_parameters(rollout) | {"stop_token_ids": sorted(stops)}

        # With rollout.on_update=keep, the prefix cache keeps what was computed with old weights. So groups
        # share it only with groups that were started with the same weights.
        keeps = rollout.on_update == OnUpdate.keep
        cache = f"version {request.weight_version}" if keeps else ""
        group.expect(rollout.n, len(prompt.ids) + rollout.max_response_length)

        async def ask(
            member: int, ids: list[int], limit: int, routed: int = 0, top: int = 0, part: int = 0
        ) -> Completion:
            member += rollout.n * part  # requests of one episode may be in progress at the same time
            sampling = parameters | {"max_new_tokens": limit}
            whole = Request((request.key, member), ids, sampling, routed=routed, top=top, cache=cache)
            group.asks(member, len(ids) + limit, opened.limit(group.engine))
            try:
                completion = await _complete(whole, group, opened)
            finally:
                group.answered(member, opened.limit(group.engine))
            _check(completion, request, this.over_updates)
            return completion

        if rollout.strategy == Strategy.beam:
            search = BeamSearch(rollout.n, this.end_ids | stops, rollout.max_response_length, rollout.beam)
            asked = prompt.ids.tolist()
            await run_search(search, lambda beam, ids, top: ask(beam, asked + ids, 1, top=top))
            responds = [partial(_already_found, completion) for completion in search.completions(request.key)]
        else:
            responds = [partial(ask, member) for member in range(rollout.n)]
        state = (1, prompt.uid) if this.same_states else (0, request.group_id)
        first = request.group_id * rollout.n
        episodes = (
            Episode(prompt, request.group_id, first + member, rollout.max_response_length, state)
            for member in range(len(responds))
        )

        async def play(member: int, episode: Episode, respond: Respond) -> tuple[Sample, ...]:
            samples = await self._episodes.play(episode, respond)
            # An episode may end without a request, for example because its environment fails at once.
            group.answered(member, opened.limit(group.engine))
            return samples

        played = await together(map(play, range(len(responds)), episodes, responds))
        return await self._episodes.complete(prompt, tuple(chain(*played)))

    def close(self) -> None:
        self._episodes.close()


class _OpenRound:
    """State of one round of a GroupSampler. A round is a set of groups that are sampled concurrently.

    round: the settings of the round
    limits: {index of an engine: number of requests that it had at a time at the end of the last round}
    clients: {index of an engine: its client} of the engines to which the round has sent requests
    without_engine: {group id: group} of the groups whose engine was lost and that wait for another one
    """

    def __init__(self, round: Round, connections: Mapping[int, EngineConnection], limits: dict[int, int]):
        self.round, self._connections, self._limits = round, connections, limits
        self.clients: dict[int, EngineClient] = {}
        self.without_engine: dict[int, PlayedGroup] = {}

    def client(self, engine: int) -> EngineClient:
        if engine not in self.clients:
            self.clients[engine] = self._connections[engine].client(self.round.id, self._limits.get(engine))
        return self.clients[engine]

    def limit(self, engine: int) -> int:
        """Return the number of requests that an engine should have at a time now."""
        return self.client(engine).limit.limit

    async def end(self) -> None:
        self._limits |= {engine: self.limit(engine) for engine in self.clients}
        await all_ended(group.end() for group in self.without_engine.values())
        await all_ended(_end(client) for client in self.clients.values())


async def _complete(request: Request, group: PlayedGroup, opened: _OpenRound) -> Completion:
    """Return the completion of a request, which another engine continues if the group's engine is lost."""
    log = ResponseLog()
    while True:
        moves, client = group.moves, opened.client(group.engine)
        try:
            return log.complete(await client.generate(log.rest_of(request), log.append))
        except ProcessLost as error:
            await group.moved(moves, EngineLost(str(error)))


async def _end(client: EngineClient) -> None:
    """End the requests of a client on its engine. If the engine has died, there is nothing to end."""
    with suppress(ProcessLost):
        await client.end()


def _check(completion: Completion, request: GroupRequest, over_updates: bool) -> None:
    """Check that an engine finished a request, and that it used the weights that the trainer had published.

    The weight version of every token must be request.weight_version. If `over_updates` is True, it may also
    be newer.

    completion: the engine's answer.
    over_updates: True if the engines may get new weights during the round.

    Raises UserError if the engine aborted the request, or StaleWeights if it used other weights.
    """
    if completion.finish_reason == "abort":
        raise UserError(
            f"the engine aborted a request (prompt record {request.prompt.uid}); see the engine's log"
        )
    used, version = {span.version for span in completion.weight_spans}, request.weight_version
    stale = {one for one in used if one < version or (one > version and not over_updates)}
    if stale:
        raise StaleWeights(
            f"the engine answered with weight version {sorted(stale)}, but the trainer has version "
            f"{version}: a weight update did not reach the engine; see the engine's log"
        )


async def _already_found(completion: Completion, ids: list[int], limit: int, routed: int = 0) -> Completion:
    """Return a response that a beam search has already found, in place of a request to the engine.

    completion: the response.
    ids, limit, routed: not used. A function that asks the engine for a response has these parameters.
    """
    return completion
