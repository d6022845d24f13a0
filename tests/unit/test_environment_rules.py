"""Settings that rollout.environment can be combined with."""

import pytest

from grpo_megatron.errors import UserError
from grpo_megatron.preflight.check import load_config


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
        (["rollout.max_turns=3"], "only with rollout.environment or .*agent.command .rollout.max_turns=3"),
        ([WORLD, "reward.function=math"], "rewards the model itself; remove them .reward.function=math"),
        ([WORLD, "reward.extract=x"], "rewards the model itself; remove them .reward.extract=x"),
        (
            [WORLD, "reward.response_from=[boxed]"],
            "rewards the model itself; remove them .reward.response_from=",
        ),
        (
            [WORLD, "rollout.tools=[python,x:y]"],
            "rollout.tools has an effect only with rollout.environment=tools",
        ),
        (
            [WORLD, "rollout.gymnasium.id=x"],
            "only with rollout.environment=gymnasium .rollout.gymnasium.id=x",
        ),
        (["rollout.environment=tools", "rollout.tools=[abacus]"], "rollout.tools=abacus is unknown"),
        (["rollout.environment=tools", "reward.function=mathh"], "reward.function=mathh is unknown"),
        (
            [
                "rollout.environment=tools",
                "reward.terms={right: {function: math}, best: {function: rank, by: right}}",
            ],
            "reward rank of reward.terms.best compares the responses to a prompt",
        ),
        (["rollout.history=template"], "rollout.history has an effect only with rollout.environment"),
        (
            [WORLD, "rollout.history=template", "data.chat_template=none"],
            "there is no template to render",
        ),
        (
            [WORLD, "rollout.history=template", "data.overlong_prompts=truncate_left"],
            "cannot be cut; set data.overlong_prompts=skip",
        ),
    ],
)
def test_what_does_not_go_with_it(overrides, says):
    with pytest.raises(UserError, match=says):
        configured(*overrides)
