"""Where a step's groups come from: engines, or a recording. The controller sees one interface."""

from grpo_megatron.batch.sample import Group
from grpo_megatron.config.schema import Config, RolloutConfig
from grpo_megatron.data import PromptSource
from grpo_megatron.rollout.manager import RolloutManager, Sampling
from grpo_megatron.rollout.record import Recorder, Replay


def training_sampling(config: RolloutConfig) -> Sampling:
    return Sampling(
        n=config.n,
        temperature=config.temperature,
        max_response_length=config.max_response_length,
        stop=tuple(config.stop),
        stop_token_ids=tuple(config.stop_token_ids),
    )


class EngineRollouts:
    """Groups sampled by the engines under the newest weights, optionally recorded."""

    def __init__(self, manager: RolloutManager, config: Config, resumed: int = 0):
        """resumed: the step a resumed run continues after."""
        self._manager = manager
        self._batch_size = config.data.train_batch_size
        self._sampling = training_sampling(config.rollout)
        self._recorder = Recorder(config.rollout.record, resumed) if config.rollout.record else None

    def groups(self, step: int, prompts: PromptSource | None) -> list[Group]:
        groups = self._manager.generate(prompts.next(self._batch_size), self._sampling)
        if self._recorder:
            self._recorder.write(step, groups)
        return groups

    def state_dict(self) -> dict:
        return self._manager.state_dict()

    def load_state_dict(self, state: dict) -> None:
        if state:  # empty if the checkpoint is of a replayed run
            self._manager.load_state_dict(state)

    def close(self) -> None:
        if self._recorder:
            self._recorder.close()


class ReplayedRollouts:
    """Groups read from a recording; there are no engines, so weights go nowhere."""

    def __init__(self, path: str):
        self._replay = Replay(path)

    def groups(self, step: int, prompts: PromptSource | None) -> list[Group]:
        return self._replay.read(step)

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        pass

    def close(self) -> None:
        pass
