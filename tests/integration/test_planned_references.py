"""The planner's stand-in for Ray's references is pickled with as many bytes as a real one."""

from dataclasses import replace

import numpy as np
import pytest

from grpo_megatron.model.families import read_architecture
from grpo_megatron.planner.lengths import Lengths
from grpo_megatron.planner.traffic import StepData, pickled
from grpo_megatron.rollout.worker import StoredValue
from tools.plan_recipes import recipe

pytestmark = pytest.mark.slow


def test_ray_sends_a_row_with_the_planned_bytes(ray_here):
    import ray

    config = recipe("qwen3_8b_1node")
    config = replace(config, rollout=replace(config.rollout, n=1))
    planned = StepData(config, read_architecture(config.model.path), Lengths.given(config)).answer(0)
    (row,) = planned.samples
    group = ray.put([ray.put(np.zeros(1_000_000, np.int8)), ray.put("text")])
    stored = replace(row, handle=StoredValue(group, 0), texts=StoredValue(group, 1))
    real = replace(planned, samples=(stored,))
    context = ray._private.worker.global_worker.get_serialization_context()
    assert context.serialize([real]).total_bytes == pytest.approx(pickled([planned]), rel=0.05)
