"""Published runs fit into the planner's memory, and their steps took longer than its times."""

from pathlib import Path

import pytest

from grpo_megatron.config.load import read_config
from grpo_megatron.planner.advice import planned_architecture
from grpo_megatron.planner.plan import gb
from grpo_megatron.preflight.model import architecture_violations
from grpo_megatron.preflight.rules import violations
from tests.unit.published_runs import MLPERF, MLPERF_STEPS, QWEN35_397B, RUNS
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


def test_the_benchmark_of_mlperf():
    """Published lengths count only tokens with a loss, and published steps include the agents' tools.

    So the model's times are too small. Were all contexts full, the model's training would take longer than
    the published.
    """
    steps, trainings, full = [], [], []
    for samples, (step, training, tokens) in MLPERF_STEPS.items():
        prompts = [f"{key}={samples // 16}" for key in ("data.train_batch_size", "train.ppo_mini_batch_size")]
        config = read_config(None, [f"model.path={QWEN35_397B}", *MLPERF, *prompts])
        found = planned(config, prompt=256, response=tokens - 256)
        longest = planned(config, prompt=4096, response=61440)
        assert found.problems == longest.problems == ()
        steps.append((step, found.times.step))
        trainings.append((training, found.times.seconds["training"]))
        full.append(longest.times.seconds["training"])
        assert found.times.seconds["training"] < training < full[-1]
        assert 2 < step / found.times.step < 4.5
    memory = f"{gb(found.memory.fullest.total)} of {gb(found.memory.usable)} GB"
    columns = memory, *(", ".join(f"{pair[side]:.0f}" for pair in steps) for side in (0, 1))
    page = Path("docs/planner.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| MLPerf 6.1, Qwen3.5-397B-A17B"))
    assert row.endswith("| {} (generation) | {} | {} |".format(*columns))
    published, ours = (", ".join(f"{pair[side]:.0f}" for pair in trainings) for side in (0, 1))
    assert f"took {published} s, by the model {ours} s" in " ".join(page.split())
    assert f"would have {', '.join(f'{seconds:.0f}' for seconds in full)} s" in " ".join(page.split())
