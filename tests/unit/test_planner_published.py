"""Published runs fit into the planner's memory, and their steps took longer than its times."""

import json
from pathlib import Path

import pytest

from grpo_megatron.config.load import read_config
from grpo_megatron.errors import UserError
from grpo_megatron.planner.advice import checked_plan, planned_architecture
from grpo_megatron.planner.lengths import Lengths
from grpo_megatron.preflight.model import architecture_violations
from grpo_megatron.preflight.rules import violations
from tests.unit.published_runs import LIKE_QWEN35_397B, MLPERF, RUNS
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


@pytest.mark.slow
def test_the_benchmark_of_mlperf_is_refused_by_its_family_and_its_experts_fit(tmp_path):
    model = json.loads(Path("configs/models/qwen3-30b-a3b/config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(model | {"architectures": ["Qwen3_5MoeForConditionalGeneration"]})
    )
    config = read_config(None, [*MLPERF, f"model.path={tmp_path}"])
    with pytest.raises(UserError, match="the architecture Qwen3_5Moe"):
        planned_architecture(config)
    (tmp_path / "config.json").write_text(json.dumps(model | LIKE_QWEN35_397B))
    arch = planned_architecture(config)
    found = checked_plan(config, arch, Lengths.given(config), with_sync=False)
    experts = 60 * 512 * 3 * 4096 * 1024
    assert found.memory.state.parameters > 2 * experts / (2 * 32)
    assert found.memory.state.optimizer > 12 * experts / (2 * 32)
