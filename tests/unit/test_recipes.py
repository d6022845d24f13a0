"""The configurations for clusters are legal there, also for their models, and fit into their GPUs' memory."""

from pathlib import Path

import pytest

from grpo_megatron.config.load import read_config
from grpo_megatron.model.families import read_architecture
from grpo_megatron.planner.plan import plan
from grpo_megatron.preflight.check import check
from grpo_megatron.preflight.model import architecture_violations
from tests.tools import run_tool
from tools.plan_recipes import RECIPES


@pytest.fixture(params=RECIPES)
def recipe(request):
    """(name, its Config, its model's Architecture)."""
    model = f"configs/models/{RECIPES[request.param]}"
    config = read_config(f"configs/{request.param}.yaml", [f"model.path={model}"])
    return request.param, config, read_architecture(model)


def test_there_are_no_others():
    assert {path.stem for path in Path("configs").glob("*node.yaml")} == set(RECIPES)


def test_it_is_legal_on_its_cluster_and_for_its_model(recipe):
    name, config, arch = recipe
    found = check(f"configs/{name}.yaml", ["model.path=/nowhere"])
    assert not any("capabilities of the cluster" in what for what in found.not_checked)
    assert found.violations + architecture_violations(config, arch) == []


def test_a_layout_that_the_model_does_not_allow_would_be_noticed(recipe):
    name, _, arch = recipe
    model = f"configs/models/{RECIPES[name]}"
    other = read_config(f"configs/{name}.yaml", [f"model.path={model}", "megatron.tensor_parallel=7"])
    assert any(
        "megatron.tensor_parallel must divide the model's attention heads" in violation
        for violation in architecture_violations(other, arch)
    )


def test_it_uses_the_whole_cluster(recipe):
    _, config, _ = recipe
    cluster, megatron, engine = config.cluster, config.megatron, config.rollout.engine
    gpus = cluster.nodes * cluster.gpus_per_node
    ranks = (
        megatron.tensor_parallel
        * megatron.pipeline_parallel
        * megatron.data_parallel
        * megatron.context_parallel
    )
    engines = engine.num_engines * engine.tensor_parallel
    assert (
        (ranks, engines) == (gpus, gpus)
        if cluster.placement.value == "colocated"
        else ranks + engines == gpus
    )


@pytest.mark.slow_but(2)
def test_it_fits(recipe):
    """The planner's reserve is left, and the KV cache holds at least 16 of the longest sequences."""
    _, config, arch = recipe
    found = plan(config, arch, with_sync=False)
    assert found.problems == ()
    assert found.memory.room.tokens >= 16 * (
        config.data.max_prompt_length + config.rollout.max_response_length
    )
    assert sum(found.memory.host.values()) <= 10**12


def test_pipelines_need_not_exchange_shapes(recipe):
    _, config, _ = recipe
    assert config.train.constant_length_packs == (config.megatron.pipeline_parallel > 1)


def test_it_says_why_in_two_lines(recipe):
    comments = [
        line for line in Path(f"configs/{recipe[0]}.yaml").read_text().splitlines() if line.startswith("#")
    ]
    assert len(comments) == 2
    assert "docs/recipes.md" in comments[1]


def test_the_documented_table_is_that_of_the_configurations():
    table, _ = run_tool("plan_recipes")
    assert table in Path("docs/recipes.md").read_text()
