"""The configuration with which the self-test runs."""

from pathlib import Path

import pytest

from grpo_megatron.commands.evaluate import evaluation_config
from grpo_megatron.commands.selftest import selftest_config
from grpo_megatron.config.load import read_config
from grpo_megatron.config.schema import LrSchedule


@pytest.mark.parametrize("name", sorted(path.stem for path in Path("configs").glob("*.yaml")))
def test_every_configuration_has_those_of_a_self_test_and_of_an_evaluation(name):
    """A section's bounds also hold when code makes it, and the self-test trains with learning rate 0."""
    config = read_config(f"configs/{name}.yaml", ["model.path=model"])
    changed = selftest_config(config, steps=3)
    optimizer = changed.optimizer
    assert (optimizer.lr, optimizer.lr_min, optimizer.lr_schedule) == (0.0, 0.0, LrSchedule.constant)
    assert (changed.run.total_steps, changed.run.name) == (3, f"{config.run.name}_selftest")
    assert evaluation_config(config).run.name == f"{config.run.name}_eval"
    assert config.optimizer.lr > 0
