"""A recording in place of engines."""

import contextlib

import numpy as np

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Group
from grpo_megatron.rollout import source
from grpo_megatron.rollout.source import ReplayedRollouts


class Recording:
    """Two groups in every step."""

    def __init__(self, path):
        self.path = path

    def read(self, step):
        return [Group(i, Prompt(10 * step + i, np.array([1]), "", ""), ()) for i in range(2)]


def test_a_step_takes_the_recorded_groups_and_uses_up_their_prompts(monkeypatch):
    monkeypatch.setattr(source, "Replay", Recording)
    phases = []
    rollouts = ReplayedRollouts("file", lambda name: phases.append(name) or contextlib.nullcontext())
    rollout = rollouts.take(3)
    assert [group.prompt.uid for group in rollout.groups] == [30, 31]
    assert phases == ["generate"]
    # No engine generates, so there are no weights that samples could lag behind.
    assert rollouts.version is None
    # A run with engines continues from this state: its data and its weight versions start over.
    assert rollouts.state_dict() == {"rollouts": {}, "prompts": None, "weight_sync": None}
