"""The planner's stand-in for Ray's references is pickled with as many bytes as a real one."""

from dataclasses import replace

import numpy as np
import pytest

from grpo_megatron.model.families import read_architecture
from grpo_megatron.planner.lengths import Lengths
from grpo_megatron.planner.traffic import StepData, pickled
from grpo_megatron.rollout.sample_store import StoredValue
from tools.plan_recipes import recipe

pytestmark = pytest.mark.slow


def test_ray_sends_a_row_with_the_planned_bytes(ray_here):
    """A second message is added to the first, because Ray also sends a head, whose length is the same for any
    number of rows.
    """
    import ray

    config = recipe("qwen3_8b_1node")
    config = replace(config, rollout=replace(config.rollout, n=1))
    data = StepData(config, read_architecture(config.model.path), Lengths.given(config))
    planned = [data.answer(0), data.answer(1)]

    def stored(answer):
        (row,) = answer.samples
        group = ray.put([ray.put(np.zeros(1_000_000, np.int8)), ray.put("text")])
        row = replace(row, handle=StoredValue(group, 0), texts=StoredValue(group, 1))
        return replace(answer, samples=(row,))

    real = list(map(stored, planned))
    context = ray._private.worker.global_worker.get_serialization_context()
    sent = [context.serialize(real[:count]).total_bytes for count in (1, 2)]
    expected = [pickled(planned[:count]) for count in (1, 2)]
    print(sent, expected)
    assert sent[1] - sent[0] == pytest.approx(expected[1] - expected[0], rel=0.05)
    assert sent[0] == pytest.approx(expected[0], abs=64)
