"""Gymnasium's tasks as environments: observations as text, turns as actions, one map for a group."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.frozen_lake import around, surroundings
from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.config.command import Command
from grpo_megatron.config.reward import RewardConfig
from grpo_megatron.config.rollout import GymnasiumConfig, InvalidAction, RolloutConfig
from grpo_megatron.data.tokenizer import PromptTokenizer
from grpo_megatron.errors import UserError
from grpo_megatron.preflight.check import load_config
from grpo_megatron.rollout.environments import resolve_environment

gymnasium = pytest.importorskip("gymnasium")

ROWS = ["SFFF", "FHFH", "FFFH", "HFFG"]
LAKE = {
    "id": "FrozenLake-v1",
    "args": {"is_slippery": False},
    "record_args": ["desc"],
    "text": "examples.frozen_lake:surroundings",
    "actions": ["L", "D", "R", "U"],
}


def begin(prompt_fields=None, seed=0, **settings):
    """Return (the environment, its first observation)."""
    config = RolloutConfig(environment="gymnasium", gymnasium=GymnasiumConfig(**settings))
    made = resolve_environment(config, RewardConfig())(Prompt(7, [1], "", "", prompt_fields or {}))
    return made, made.reset(seed)


def shown(observation):
    (message,) = observation
    assert message["role"] == "user"
    return message["content"]


def test_a_way_to_the_goal():
    world, first = begin({"desc": ROWS}, **LAKE)
    assert shown(first) == "00 L#DFRFU#"
    results = [world.step(move) for move in ("D", " D\n", "R", "L", "R", "R", "D", "R")]
    assert [shown(result.observation) for result in results[:3]] == [
        "10 L#DFRHUS",
        "20 L#DHRFUF",
        "21 LFDFRFUH",
    ]
    assert [(result.reward, result.done) for result in results] == [(0, False)] * 7 + [(1, True)]
    world.close()


def test_a_hole_ends_it_without_reward():
    world, _ = begin({"desc": ROWS}, **LAKE)
    assert not world.step("R").done
    result = world.step("D")
    assert (result.reward, result.done, result.components) == (0, True, {"invalid_actions": 0})


@pytest.mark.parametrize("response", ["", "d", "down", "D R", "1"])
def test_a_turn_that_is_no_action(response):
    world, _ = begin({"desc": ROWS}, **LAKE, invalid_reward=-0.5)
    result = world.step(response)
    assert shown(result.observation) == "not one of L, D, R, U\n00 L#DFRFU#"
    assert (result.reward, result.done, result.components) == (-0.5, False, {"invalid_actions": 1})
    assert shown(world.step("D").observation).startswith("10 ")  # it has not moved before
    world, _ = begin({"desc": ROWS}, **LAKE, invalid_action=InvalidAction.end)
    assert world.step(response).done


def test_a_pattern_finds_the_action():
    world, _ = begin({"desc": ROWS}, **LAKE, action_pattern="<move>(.)</move>")
    assert shown(world.step("not <move>R</move> but <move>D</move>").observation).startswith("10 ")
    assert world.step("D").components == {"invalid_actions": 1}


def test_observations_and_actions_of_any_discrete_task():
    """Observations and actions are numbers without text and words for them.

    The seed decides where an episode begins.
    """
    worlds = [begin(seed=seed, id="Taxi-v3") for seed in (1, 1, 2, 3)]
    starts = [shown(first) for _, first in worlds]
    assert starts == ["252", "252", "128", "42"]
    result = worlds[0][0].step("0")
    assert (shown(result.observation), result.reward) == ("352", -1)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({**LAKE, "actions": ["L", "R"]}, "actions has 2 words, but FrozenLake-v1 has 4 actions"),
        ({**LAKE, "record_args": ["map"]}, "the record has no field 'map'"),
        ({"id": "phys2d/CartPole-v99"}, "rollout.gymnasium.id=phys2d/CartPole-v99"),
        ({"id": "Lake-v1"}, "rollout.gymnasium.id=Lake-v1: .*Lake"),
        ({"id": "no_such_module:Lake-v1"}, "rollout.gymnasium.id=no_such_module:Lake-v1 cannot be imported"),
        ({"id": "Pendulum-v1"}, "has the action space Box.*, but only Discrete action spaces are supported"),
        (
            {**LAKE, "text": "examples.frozen_lake:nothing"},
            "rollout.gymnasium.text=.* has no function nothing",
        ),
    ],
)
def test_what_cannot_be_played(settings, says):
    with pytest.raises(UserError, match=says):
        begin({"desc": ROWS}, **settings)


@pytest.mark.slow
def test_what_is_missing_is_said_before_a_run():
    script = (
        "import sys; sys.modules['gymnasium'] = None\n"
        "from grpo_megatron.preflight.check import load_config\n"
        "load_config(None, ['model.path=m', 'data.train=d.jsonl', 'rollout.environment=gymnasium'])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert "requires the gymnasium package; run `pip install gymnasium`" in done.stderr
    with pytest.raises(UserError, match=r"rollout.gymnasium.id=Lake-v1: "):
        load_config(
            None,
            [
                "model.path=m",
                "data.train=d.jsonl",
                "rollout.environment=gymnasium",
                "rollout.gymnasium.id=Lake-v1",
            ],
        )


# -- tools/frozen_lake.py


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    from frozen_lake import make

    folder = tmp_path_factory.mktemp("lake")
    counts = make(folder, seed=5, train=60, held_out=20, episodes=200, lost=0.5)
    assert counts == {"train": 60, "eval": 20, "sft": 200}
    read = {
        name: [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in counts
    }
    return folder, read


def test_no_map_is_in_both(files):
    _, read = files
    train, held_out = ({tuple(record["desc"]) for record in read[name]} for name in ("train", "eval"))
    assert (len(train), len(held_out)) == (60, 20)
    assert not train & held_out
    from frozen_lake import distances

    for rows in train | held_out:
        assert (0, 0) in distances(rows)  # the goal can be reached


def test_the_warm_start_learns_what_the_environment_shows(files):
    """Each recorded episode is played again in the environment, whose answers must match the record."""
    _, read = files
    reached = 0
    for record in read["sft"]:
        *rows, first = record["prompt"].split("\n")
        world, observation = begin({"desc": rows}, **LAKE)
        assert shown(observation) == first
        result = None
        for message in record["response"]:
            if message["role"] == "assistant":
                assert not (result and result.done)
                result = world.step(message["content"])
            else:
                assert message["content"] == shown(result.observation)
        reached += result.reward
    assert 0.1 < reached / len(read["sft"]) < 0.4  # mostly lost


def test_a_prompt_with_its_first_observation_is_what_was_learned(files, tmp_path):
    """The tokens of GRPO's first request are those of the warm start's prompt."""
    from make_tiny_model import make_tokenizer

    from grpo_megatron.data import load_prompts
    from grpo_megatron.data.examples import load_examples
    from grpo_megatron.rollout.history import AppendedHistory

    folder, read = files
    make_tokenizer("bytes").save_pretrained(tmp_path)
    config = load_config(
        "configs/frozen_lake_sft.yaml",
        [f"model.path={tmp_path}", f"data.train={folder}/sft.jsonl"],
        Command.sft,
    )
    tokenizer = PromptTokenizer(str(tmp_path))
    [example, *_], _ = load_examples(config, tokenizer)
    prompts, _ = load_prompts(str(folder / "train.jsonl"), tokenizer, config.data)
    (prompt,) = [
        prompt for prompt in prompts if read["sft"][0]["prompt"].startswith(prompt.messages[0]["content"])
    ]
    world, first = begin({"desc": prompt.fields["desc"]}, **LAKE)
    history = AppendedHistory(prompt, tokenizer)
    ids = history.begin(first)
    assert ids == example.prompt_ids.tolist()
    turns = [message["content"] for message in read["sft"][0]["response"] if message["role"] == "assistant"]
    trained = []
    for turn in turns:
        own = [*tokenizer.encode(turn).tolist(), tokenizer.tokenizer.eos_token_id]
        ids, result = ids + own, world.step(turn)
        trained += own
        if len(trained) < 2 * len(turns):
            ids = history.go_on(ids, turn, result.observation)
    assert ids == [*example.prompt_ids.tolist(), *example.response_ids.tolist()]
    assert example.response_ids[example.loss_mask].tolist() == trained


def test_surroundings_of_an_edge():
    assert around(ROWS, 3, 3) == "33 LFD#R#UH"
    world, _ = begin({"desc": ["SF", "FG"]}, **LAKE)
    assert surroundings(world._task, 3) == "11 LFD#R#UF"


@pytest.mark.slow
def test_minigrid_with_the_text_of_the_documentation(tmp_path, monkeypatch):
    pytest.importorskip("minigrid")
    (example,) = re.findall(
        r"```python\n(.*?)```", Path("docs/environments.md").read_text(encoding="utf-8"), re.DOTALL
    )
    (tmp_path / "my_grids.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    world, first = begin(
        id="minigrid:MiniGrid-Empty-5x5-v0",
        text="my_grids:grid",
        actions=["left", "right", "forward", "pick up", "drop", "toggle", "done"],
    )
    assert shown(first).splitlines()[:2] == ["get to the green goal square", "WGWGWGWGWG"]
    results = [world.step(move) for move in ("forward", "forward", "right", "forward", "forward")]
    assert [result.done for result in results] == [False] * 4 + [True]
    assert 0 < results[-1].reward < 1
    world.close()
