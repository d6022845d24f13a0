"""Settings that rollout.environment can be combined with."""

import pytest

from grpo_megatron.errors import UserError
from grpo_megatron.preflight.load import load_config


def configured(*overrides):
    return load_config(None, ["model.path=m", "data.train=d.jsonl", *overrides])


WORLD = "rollout.environment=tests.unit.toy_environments:counting"


def test_an_environment_is_legal():
    config = configured(WORLD, "rollout.max_turns=3", "reward.on_failure=value", "reward.failure_value=-1")
    assert (config.rollout.max_turns, config.reward.failure_value) == (3, -1.0)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["rollout.environment=no_such_module:f"], "cannot be imported"),
        (["rollout.environment=tests.unit.toy_environments:nothing"], "has no function nothing"),
        (["rollout.environment=frozen_lake"], "is unknown; choose one of"),
        ([WORLD, "rollout.max_turns=0"], "rollout.max_turns must be greater than 0"),
        (["rollout.max_turns=3"], "rollout.max_turns=3 means nothing without rollout.environment"),
        ([WORLD, "reward.function=math"], "reward.function means nothing with rollout.environment"),
        ([WORLD, "reward.extract=x"], "reward.extract means nothing with rollout.environment"),
        (
            [WORLD, "reward.response_from=[boxed]"],
            "reward.response_from means nothing with rollout.environment",
        ),
        (
            [WORLD, "rollout.tools=[python,x:y]"],
            "rollout.tools means nothing without rollout.environment=tools",
        ),
        (
            [WORLD, "rollout.gymnasium.id=x"],
            "rollout.gymnasium means nothing without rollout.environment=gymnasium",
        ),
        (["rollout.environment=tools", "rollout.tools=[abacus]"], "rollout.tools=abacus is unknown"),
        (["rollout.environment=tools", "reward.function=mathh"], "reward.function=mathh is unknown"),
        (
            [
                "rollout.environment=tools",
                "reward.terms={right: {function: math}, best: {function: rank, by: right}}",
            ],
            "reward rank of reward.terms.best compares the answers to a prompt",
        ),
        (["rollout.history=template"], "rollout.history=template means nothing without rollout.environment"),
        ([WORLD, "rollout.history=template", "data.chat_template=none"], "needs a chat template"),
        (
            [WORLD, "rollout.history=template", "data.overlong_prompts=truncate_left"],
            "cannot shorten: use skip or error",
        ),
    ],
)
def test_what_does_not_go_with_it(overrides, says):
    with pytest.raises(UserError, match=says):
        configured(*overrides)
