"""Published runs fit into the planner's memory, and their steps took longer than its times."""

from pathlib import Path

import pytest

from grpo_megatron.config.load import read_config
from grpo_megatron.planner.advice import planned_architecture
from grpo_megatron.preflight.model import architecture_violations
from grpo_megatron.preflight.rules import violations
from tests.unit.published_runs import RUNS
from tests.unit.small_plans import planned


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("name", RUNS)
def test_published_runs_fit(name):
    """They are also legal here.

    Their steps took longer than the model, which does not know their software's costs.
    """
    run = RUNS[name]
    config = read_config(None, [f"model.path=configs/models/{run.model}", *run.settings])
    arch = planned_architecture(config)
    assert violations(config) + architecture_violations(config, arch) == []
    response = min(run.sequence - 256, config.rollout.max_response_length)
    found = planned(config, prompt=256, response=response)
    assert found.problems == ()
    assert 1 < run.step / found.times.step < 6
    row = next(
        line for line in Path("docs/planner.md").read_text().splitlines() if line.startswith(f"| {name} |")
    )
    fullest = f"{found.memory.fullest.total / 1e9:.1f} of 80.7 GB ({found.memory.fullest.name})"
    assert row.endswith(f"| {fullest} | {run.step} | {found.times.step:.0f} |")
