"""Episodes: a prompt, the model's turns, and the answers to them, turned into Samples to train on."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Sample
from grpo_megatron.batch.written_turn import WrittenTurn
from grpo_megatron.cluster.pool_worker import Place
from grpo_megatron.config.derived import scores_on_ranks
from grpo_megatron.config.reward import OnFailure, RewardConfig
from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.config.schema import Config
from grpo_megatron.data import PromptTokenizer
from grpo_megatron.data.prompts import RecordCheck
from grpo_megatron.errors import UserError
from grpo_megatron.logs import Rarely
from grpo_megatron.rewards import RewardWorkers, resolve_rewards
from grpo_megatron.rewards.base import check_record
from grpo_megatron.rollout.environment_workers import FAILURES, Environments, RemoteEnvironment
from grpo_megatron.rollout.environments import StepResult, asks_reward_function
from grpo_megatron.rollout.episode_time import EpisodeTooLong, in_time
from grpo_megatron.rollout.history import HISTORIES
from grpo_megatron.rollout.published.tasks import must_have_task
from grpo_megatron.rollout.reward_model_input import RewardModelInput
from grpo_megatron.rollout.trajectory import Episode, Respond, Trajectory
from grpo_megatron.sglang.request import Completion

logger = logging.getLogger(__name__)


class EpisodePlayer(Protocol):
    """Interface of an object that plays the episodes of groups, and has them scored."""

    async def play(self, episode: Episode, respond: Respond) -> tuple[Sample, ...]:
        """Play one episode. Return its samples, or () if it is left out."""

    async def complete(self, prompt: Prompt, samples: Sequence[Sample]) -> tuple[Sample, ...]:
        """Return all samples of a prompt, with what needs all of them. They replace those of `play`."""

    def close(self) -> None:
        """End the worker processes."""


class SingleTurn:
    """Plays episodes without an environment. Each episode consists of a prompt and one response.

    Reward workers score finished responses while the engines still generate other responses.
    """

    def __init__(self, rewards: RewardWorkers, model_input: RewardModelInput | None = None):
        """Create a player of episodes that have no environment.

        rewards: the worker processes that score the responses with the reward functions.
        model_input: puts together what a reward model on the trainer's ranks reads. None: there is no such
            reward model.
        """
        self._rewards, self._model_input = rewards, model_input

    async def play(self, episode: Episode, respond: Respond) -> tuple[Sample, ...]:
        """Generate and score one response. Return it as a tuple of one sample.

        If the reward fails, reward.on_failure decides: the error is raised (error), the tuple is empty
        (leave_out), or the sample gets the reward reward.failure_value (value).

        episode: prompt, ids and token limit of the episode.
        respond: async function that asks the engine for the response. Its arguments are the token ids to
            continue and the maximum number of new tokens.
        """
        trajectory = Trajectory(episode)
        turn = await respond(trajectory.ids, trajectory.room)
        trajectory.write(turn)
        (sample,) = trajectory.samples(turn.finish_reason)
        sample = await self._rewards.score(episode.prompt, sample)
        return () if sample.is_left_out else (sample,)

    async def complete(self, prompt: Prompt, samples: Sequence[Sample]) -> tuple[Sample, ...]:
        """Add the group rewards, which score all samples of a prompt together, and return the samples.

        If a reward model on the trainer's ranks will score the samples, each sample also gets the input of
        this model (Sample.conversation). With reward.on_failure=leave_out, samples whose reward failed are
        removed.

        samples: all samples of the prompt, as `play` returned them.
        """
        scored = [
            sample for sample in await self._rewards.score_group(prompt, samples) if not sample.is_left_out
        ]
        if self._model_input is not None:
            read = partial(self._model_input.conversation, prompt)
            scored = [replace(sample, conversation=read(sample)) for sample in scored]
        return tuple(scored)

    def close(self) -> None:
        if self._rewards:
            self._rewards.close()


class Unscored:
    """Plays episodes that consist of a prompt and one response, without a reward."""

    def __init__(self, tokenizer: PromptTokenizer):
        self._decode = tokenizer.decoder

    async def play(self, episode: Episode, respond: Respond) -> tuple[Sample, ...]:
        """Generate one response. Return it as a tuple of one sample without a reward."""
        trajectory = Trajectory(episode)
        turn = await respond(trajectory.ids, trajectory.room)
        trajectory.write(turn)
        (sample,) = trajectory.samples(turn.finish_reason)
        return (sample.with_texts(self._decode(turn.response_ids)),)

    async def complete(self, prompt: Prompt, samples: Sequence[Sample]) -> tuple[Sample, ...]:
        return tuple(samples)

    def close(self) -> None:
        """Do nothing, because there are no worker processes."""


class MultiTurn:
    """Plays episodes in which an environment answers each turn of the model.

    The reward of an episode is the sum of the rewards of its turns. If the environment asks for it, the
    reward of reward.function for the last turn is added. In the samples, each turn has the token ids that
    were sampled, after the token ids that the model read before the turn. Texts are not tokenized again.
    """

    def __init__(
        self,
        environments: Environments,
        tokenizer: PromptTokenizer,
        rollout: RolloutConfig,
        reward: RewardConfig,
        seed: int,
        rewards: RewardWorkers | None = None,
        reads_calls: bool = False,
    ):
        """Create a player of episodes with environments. The settings are the same for all episodes of a run.

        environments: the worker processes that run the environments.
        rollout: section `rollout` of the configuration. Read here: max_turns, history and episode_timeout.
        reward: section `reward` of the configuration. Read here: on_failure and failure_value, which tell
            what `play` returns if an environment fails or an episode takes too long.
        seed: run.seed, from which the environments' initial states are derived.
        rewards: scores the last turn of each episode with reward.function, in addition to the environment's
            rewards. None if the environment does not ask for this score.
        reads_calls: True if the environment also gets the tool calls of each turn.
        """
        self._environments, self._tokenizer, self._rewards = environments, tokenizer, rewards
        self._reads_calls = reads_calls
        self._max_turns, self._timeout, self._seed = rollout.max_turns, rollout.episode_timeout, seed
        self._history, self._warn = HISTORIES[rollout.history], Rarely(logger)
        self._on_failure, self._failure_value = reward.on_failure, reward.failure_value

    async def play(self, episode: Episode, respond: Respond) -> tuple[Sample, ...]:
        """Play an episode until it ends, and return its token sequences as samples with rewards.

        If the environment or reward.function fails, or the episode takes too long, reward.on_failure decides:

        - error: the error is raised.
        - leave_out: the result is ().
        - value: the samples have the reward reward.failure_value, or, if only reward.function failed, the sum
          of this value and the environment's rewards. If the environment failed before the first turn, one
          turn is generated, within the episode's time. If the episode took too long and has no turn, the
          result is ().

        episode: prompt, ids, token limit and initial state of the episode.
        respond: async function that asks the engine for a turn of the model. Its arguments are the token ids
            to continue, the maximum number of new tokens, and `routed`, see Trajectory.routed.

        Finish reasons of the samples:

        - stop: the environment is done, or has failed.
        - max_turns: the model has had `max_turns` turns.
        - length: a turn was cut off at the token limit, or an observation leaves no tokens for the next turn.
        """
        trajectory, world = Trajectory(episode), self._environments.episode(episode.prompt)
        try:
            playing = self._play_or_substitute(episode, trajectory, respond, world)
            return await in_time(playing, self._timeout, episode.prompt.uid)
        except EpisodeTooLong as error:
            # An engine may still sample a first turn, and takes no other request with the same key.
            if self._is_left_out(error, has_turn=trajectory.turns > 0):
                return ()
            return self._failed(trajectory)
        finally:
            await world.close()

    async def _play_or_substitute(
        self, episode: Episode, trajectory: Trajectory, respond: Respond, world: RemoteEnvironment
    ) -> tuple[Sample, ...]:
        """Play an episode. If it fails without a turn, generate one, because something must be trained on."""
        try:
            return await self._play(episode, trajectory, respond, world)
        except FAILURES as error:
            if self._is_left_out(error):
                return ()
        if not trajectory.turns:
            trajectory.write(await respond(trajectory.ids, trajectory.room))
        return self._failed(trajectory)

    def _is_left_out(self, error: UserError, has_turn: bool = True) -> bool:
        """Return True if an episode that has failed is left out, and warn. With on_failure=error, raise.

        has_turn: False if the episode has no turn and gets none.
        """
        if self._on_failure == OnFailure.error:
            raise error
        if self._on_failure == OnFailure.leave_out:
            self._warn(f"{error}; this episode is left out (reward.on_failure=leave_out)")
        elif not has_turn:
            self._warn(f"{error}; this episode is left out, because it has no turn")
        else:
            self._warn(f"{error}; the reward of this episode is reward.failure_value={self._failure_value}")
            return False
        return True

    def _failed(self, trajectory: Trajectory) -> tuple[Sample, ...]:
        """Return the samples of an episode that has failed, with reward.failure_value."""
        return tuple(
            replace(
                sample.scored(self._failure_value, {}),
                reward_failed=True,
            ).with_texts(self._tokenizer.decode(sample.arrays.response_ids))
            for sample in trajectory.samples("stop")
        )

    async def _play(
        self, episode: Episode, trajectory: Trajectory, respond: Respond, world: RemoteEnvironment
    ) -> tuple[Sample, ...]:
        history = self._history(episode.prompt, self._tokenizer)
        asked = len(episode.prompt.ids)
        first = history.begin(await world.reset(self._initial_state(episode)))
        if not trajectory.read(first):
            raise UserError(
                f"record {episode.prompt.uid}: the environment's first observation has {len(first) - asked} "
                f"tokens, which leaves none of the {episode.limit} tokens of rollout.max_response_length "
                "for the model; raise this limit, or move the text to the prompt"
            )
        reward, components, finish_reason = 0.0, {}, None
        while finish_reason is None:
            read = trajectory.ids
            turn = await respond(read, trajectory.room, routed=trajectory.routed)
            trajectory.write(turn)
            parts = self._parts(episode.prompt, turn, read)
            text, result = await world.step(turn.response_ids, *parts)
            reward += result.reward
            for name, value in result.components.items():
                components[name] = components.get(name, 0.0) + value
            finish_reason = self._end(trajectory, turn, result)
            if finish_reason is None:
                calls = parts[0].call_messages if parts else ()
                ids = history.go_on(trajectory.ids, text, result.observation, len(read), calls)
                finish_reason = None if trajectory.read(ids) else "length"
        samples, failed, scored_text = trajectory.samples(finish_reason), False, None
        if self._rewards:
            answer = await self._rewards.score(episode.prompt, trajectory.last_turn())
            if answer.is_left_out:
                return ()
            reward, failed, scored_text = reward + answer.reward, answer.reward_failed, text
            if both := sorted(components.keys() & answer.reward_components):
                raise UserError(
                    f"the environment and the reward functions both return a component named {both[0]}; "
                    "rename one of them"
                )
            components |= answer.reward_components
        texts = [await world.text(sample.arrays.response_ids) for sample in samples]
        return tuple(
            replace(sample.with_texts(text, scored_text), reward_failed=failed).scored(reward, components)
            for sample, text in zip(samples, texts, strict=True)
        )

    def _parts(self, prompt: Prompt, turn: Completion, read: list[int]) -> list[WrittenTurn]:
        """Return the parts of a turn in a list, which is empty if the environment does not read calls.

        read: all token ids that the model read before the turn.
        """
        if not self._reads_calls:
            return []
        return [self._tokenizer.turn_format.written_turn(turn.response_ids, read, prompt.tools)]

    async def complete(self, prompt: Prompt, samples: Sequence[Sample]) -> tuple[Sample, ...]:
        """Return the samples unchanged, because `play` has already set all rewards."""
        return tuple(samples)

    def _end(self, trajectory: Trajectory, turn: Completion, result: StepResult) -> str | None:
        """Return the finish reason if the episode ends after `turn`, else None.

        result: the environment's answer to `turn`.
        """
        if turn.finish_reason == "length":
            return "length"
        if result.done:
            return "stop"
        return "max_turns" if trajectory.turns == self._max_turns else None

    def _initial_state(self, episode: Episode) -> int:
        """Return the seed for the environment's reset(), derived from run.seed and Episode.state.

        Episodes with the same Episode.state, such as those of a group, get the same seed.
        """
        return int(np.random.SeedSequence([self._seed, *episode.state]).generate_state(1)[0])

    def close(self) -> None:
        self._environments.close()
        if self._rewards:
            self._rewards.close()


def record_check(config: Config) -> RecordCheck | None:
    """Return a function that checks, while data is loading, that the rewards can score a record.

    The function gets the record's prompt and its place, such as file and line. It raises UserError if a
    reward cannot score the record. Without this check, such a record would end the run later, when its reward
    is computed.

    With rollout.environment=verifiers:ID, the record must have the data of a task.

    The result is None if a failing reward does not end the run (reward.on_failure), if the run calls no
    reward function, or if no reward function has a check of records.

    Raises UserError if a configured reward is unknown.
    """
    if config.rollout.task_set is not None:
        return must_have_task
    if config.reward.on_failure != OnFailure.error or not asks_reward_function(config.rollout, config.reward):
        return None
    rewards = [reward for reward in resolve_rewards(config.reward) if reward.check_record]
    return partial(check_record, rewards) if rewards else None


def make_episodes(
    config: Config,
    tokenizer: PromptTokenizer,
    places: Callable[[str], Sequence[Place]],
    tools: Sequence[dict[str, Any]] | None = None,
) -> EpisodePlayer:
    """Start the worker processes of rewards and environments, and return the object that plays episodes.

    The object is an AgentEpisodes if rollout.agent is set, a PublishedEpisodes if rollout.environment names a
    task set of verifiers, a MultiTurn if rollout.environment is set, else a
    SingleTurn.

    places: function that returns the node, process name and log file of each worker process with a role. Its
        argument is the role, "reward" or "environment".
    tools: schemas of the tools that prompts show to the model. A worker process whose tools differ raises
        UserError. None: they are not compared.
    """
    rollout = config.rollout
    if rollout.agent.is_set:
        tokenizer.turn_format.prepare()
        from grpo_megatron.rollout.agents import AgentEpisodes  # loads a web server

        rewards = RewardWorkers(config.reward, tokenizer.decoder, places("reward"))
        return AgentEpisodes(rollout, config.reward, tokenizer, rewards)
    if rollout.task_set is not None:
        tokenizer.turn_format.prepare()
        from grpo_megatron.rollout.published.episodes import PublishedEpisodes

        return PublishedEpisodes(rollout, config.reward, tokenizer, places("environment")[0].process.log)
    if rollout.environment is None:
        model_input = RewardModelInput(config) if scores_on_ranks(config) else None
        return SingleTurn(RewardWorkers(config.reward, tokenizer.decoder, places("reward")), model_input)
    environments = Environments(rollout, config.reward, tokenizer.decoder, places("environment"), tools)
    asks = environments.asks_reward_function
    rewards = RewardWorkers(config.reward, tokenizer.decoder, places("reward")) if asks else None
    if reads_calls := environments.reads_calls:
        tokenizer.turn_format.prepare()
    return MultiTurn(environments, tokenizer, rollout, config.reward, config.run.seed, rewards, reads_calls)
