"""Calls that a model writes: finding, making, answering and counting them."""

import asyncio
import json
import os
import re
import time
from functools import partial

import pytest

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.cluster.worker_pool import worker_places
from grpo_megatron.commands.sft import sft
from grpo_megatron.config.command import Command
from grpo_megatron.config.reward import RewardConfig
from grpo_megatron.config.rollout import HistoryKind, RolloutConfig
from grpo_megatron.data import PromptTokenizer
from grpo_megatron.errors import UserError
from grpo_megatron.preflight.check import check, load_config
from grpo_megatron.rewards import workers
from grpo_megatron.rewards.terms import terms_of
from grpo_megatron.rollout import environment_workers
from grpo_megatron.rollout.environment_workers import Environments
from grpo_megatron.rollout.environments import offered_tools
from grpo_megatron.rollout.episodes import MultiTurn, make_episodes
from grpo_megatron.rollout.tool_environment import ToolEnvironment, tool
from grpo_megatron.rollout.trajectory import Episode
from tests.models import tiny_model
from tests.unit.test_trajectories import Writer


def search(query: str, most: int = 1) -> list:
    """Look something up.

    Args:
        query: What to look for.
        most: How many results.
    """
    if query == "nothing":
        raise LookupError("no such page")
    return [query] * most


def undescribed(query):
    return query


@tool("other_search")
def _search(query: str) -> str:
    """Look something up elsewhere.

    Args:
        query: What to look for.
    """
    return query


HERE = "tests.integration.test_tool_environment"
CALCULATOR = "examples.calculator:calculator"


def step(response, names=(CALCULATOR, f"{HERE}:search"), timeout=30.0):
    play = ToolEnvironment(names, RewardConfig(timeout=timeout))(Prompt(0, [1], "", ""))
    return asyncio.run(play.step(response))


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def answers(result):
    assert all(message["role"] == "tool" for message in result.observation)
    return [message["content"] for message in result.observation]


def test_several_calls_of_a_turn_are_answered_in_their_order():
    result = step(f"Let me see. {call('calculator', expression='6*7')} {call('search', query='x', most=2)}")
    assert answers(result) == ["42", "['x', 'x']"]
    assert (result.done, result.reward, result.components) == (
        False,
        0,
        {"tool_calls": 2, "failed_tool_calls": 0},
    )


@pytest.mark.parametrize("text", ["42", "", "<think>" + call("calculator", expression="1") + "</think>42"])
def test_a_turn_without_a_call_is_the_last(text):
    result = step(text)
    assert (result.done, result.components) == (True, {"tool_calls": 0, "failed_tool_calls": 0})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<tool_call>calculator(1)</tool_call>", "error: a call must be JSON such as"),
        ("<tool_call>[1]</tool_call>", "error: a call must be JSON such as"),
        ('<tool_call>{"arguments": {}}</tool_call>', "error: a call must be JSON such as"),
        ('<tool_call>{"name": "calculator"', "error: a call must be JSON such as"),  # not closed
        (call("abacus"), "error: there is no tool 'abacus'; the tools are calculator, search"),
        ('<tool_call>{"name": ["calculator"]}</tool_call>', "error: there is no tool"),
        (
            '<tool_call>{"name": "calculator", "arguments": [1]}</tool_call>',
            "error: arguments must be a JSON object",
        ),
        (call("calculator", expression="1/0"), "error: division by zero"),
        (call("calculator", formula="1"), "error: TypeError: .*formula"),
        (call("calculator"), "error: TypeError: .*expression"),
        (call("search", query="nothing"), "error: LookupError: no such page"),
        (call("calculator", expression=7), "error: "),
    ],
)
def test_a_call_that_fails_is_answered(text, says):
    result = step(f"{text}{call('calculator', expression='1+1')}" if text.endswith("</tool_call>") else text)
    first, *others = answers(result)
    assert re.match(says, first)
    assert others == (["2"] if text.endswith("</tool_call>") else [])
    assert not result.done
    assert result.components == {"tool_calls": 1 + len(others), "failed_tool_calls": 1}


def test_a_long_result_is_cut():
    (answer,) = answers(step(call("search", query="x" * 10000)))
    assert len(answer) < 4040
    assert "characters left out" in answer


def test_a_program_that_prints_much_and_fails_is_seen_to_fail():
    """The end of the answer used to be cut off, and with it the error message."""
    (answer,) = answers(step(call("python", code="print('x' * 5000); 1 / 0"), ["python"]))
    assert answer.endswith("ZeroDivisionError: division by zero")


def test_the_schemas_are_those_of_the_functions():
    calculator, own = ToolEnvironment([CALCULATOR, f"{HERE}:search"], RewardConfig()).tools
    assert calculator["function"]["name"] == "calculator"
    assert calculator["function"]["parameters"]["required"] == ["expression"]
    assert own["function"]["parameters"]["properties"]["most"] == {
        "type": "integer",
        "description": "How many results.",
    }
    (registered,) = ToolEnvironment([f"{HERE}:other_search"], RewardConfig()).tools
    assert registered["function"]["name"] == "_search"


def test_python_runs_in_the_sandbox():
    program = "import os\nprint(sum(range(10)), os.getcwd())"
    calls = call("python", code=program) + call("python", code="1/0")
    # On a busy machine, a program may take long to start.
    first, second = answers(step(calls, ["python"], timeout=300.0))
    assert first.startswith("45 ")
    assert first != f"45 {os.getcwd()}"
    assert "ZeroDivisionError: division by zero" in second


def test_a_machine_that_cannot_run_programs_is_no_answer_to_the_model(monkeypatch):
    play = ToolEnvironment(["python"], RewardConfig())(Prompt(7, [1], "", ""))
    monkeypatch.setattr("tempfile.tempdir", "/missing")
    with pytest.raises(UserError, match=r"the tool python could not run a program: .*/missing"):
        asyncio.run(play.step(call("python", code="print(1)")))


def test_a_turn_makes_no_call_for_which_it_has_no_time():
    """A program may take two fifths of reward.timeout, and none begins after that: a longer turn would end
    the run.
    """
    assert 2 * ToolEnvironment(["python"], RewardConfig(timeout=2.0))._seconds < 0.9 * 2.0
    endless = call("python", code="while True: pass")
    start = time.monotonic()
    result = step(endless * 3, ["python"], timeout=2.0)
    assert time.monotonic() - start < 20
    assert "(ended: " in answers(result)[0]
    assert answers(result)[1:] == ["error: there is no time left for this call in this turn"] * 2
    assert result.components == {"tool_calls": 3, "failed_tool_calls": 2}


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["abacus"], "rollout.tools=abacus is unknown; choose one of python, "),
        ([CALCULATOR, CALCULATOR], "two functions have the same name"),
        ([f"{HERE}:undescribed"], "a tool must have type hints and a docstring"),
    ],
)
def test_tools_that_cannot_be_used(names, says):
    with pytest.raises(UserError, match=says):
        assert ToolEnvironment(names, RewardConfig()).tools is None


class Scorer:
    """Replacement for the reward's processes that records what it is asked to score."""

    def __init__(self):
        self.asked = []

    async def score(self, prompt, sample):
        self.asked.append((prompt, sample.arrays.response_ids.tolist()))
        return sample.scored(0.75, {"right": 1.0})


def test_tools_and_rewards_have_workers_of_different_names(tmp_path, monkeypatch):
    from make_tiny_model import make_tokenizer

    make_tokenizer("bytes").save_pretrained(tmp_path)
    config = load_config(None, ["model.path=m", "data.train=d", "rollout.environment=tools"])
    found = []
    for module in (environment_workers, workers):  # no processes here
        monkeypatch.setattr(
            module, "WorkerPool", lambda what, build, bounds, places, again=True: found.extend(places)
        )
    make_episodes(
        config, PromptTokenizer(str(tmp_path)), partial(worker_places, ["here", "there"], 1, "logs")
    )
    names = [f"{role} worker {number}" for role in ("environment", "reward") for number in (0, 1)]
    assert [place.process.name for place in found] == names
    assert [place.process.log for place in found] == [
        f"logs/{name.replace(' worker ', '_worker')}.log" for name in names
    ]


def test_no_term_has_the_name_of_a_component():
    for name in step("").components:
        with pytest.raises(
            UserError,
            match=rf"reward.terms.{name}: the name of a term must consist .* must not be one of .*{name}",
        ):
            terms_of(RewardConfig(terms={name: {"function": "math"}}))


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("history", list(HistoryKind))
def test_an_episode_with_calls_is_scored_by_its_last_turn(places, tmp_path, history):
    from make_tiny_model import make_tokenizer

    make_tokenizer("bytes").save_pretrained(tmp_path)
    rollout, reward = RolloutConfig(environment="tools", tools=[CALCULATOR], history=history), RewardConfig()
    tokenizer = PromptTokenizer(str(tmp_path), tools=offered_tools(rollout, reward))
    text, ids = tokenizer.prompt("6*7?", "f:1")
    asked = Prompt(7, ids, text, "42", {"level": 1}, messages=tokenizer.messages("6*7?"))
    written = [f"{call('calculator', expression='6*7')}{call('abacus')}<eos>", "It is 42<eos>"]
    writer, scorer = Writer([tokenizer.encode(turn).tolist() for turn in written]), Scorer()
    environments = Environments(rollout, reward, tokenizer.decoder, places(1))
    assert environments.asks_reward_function
    try:
        play = MultiTurn(environments, tokenizer, rollout, reward, 0, scorer).play
        (sample,) = asyncio.run(play(Episode(asked, 0, 0, 400, (0, 0)), writer))
    finally:
        environments.close()
    assert scorer.asked == [(asked, tokenizer.encode(written[1]).tolist())]
    assert (sample.reward, sample.finish_reason, sample.scored_text) == (0.75, "stop", "It is 42")
    assert sample.reward_components == {"tool_calls": 2, "failed_tool_calls": 1, "right": 1.0}
    answered = "<tool>42<tool>error: there is no tool 'abacus'; the tools are calculator<assistant>"
    assert tokenizer.decode_all(sample.arrays.response_ids) == f"{written[0]}{answered}{written[1]}"
    assert tokenizer.decode_all(sample.arrays.response_ids[sample.arrays.loss_mask]) == "".join(written)


def test_sft_reads_prompts_with_the_tools_that_training_offers(tmp_path, monkeypatch):
    from make_tiny_model import make_tokenizer

    tiny_model(tmp_path, "qwen3", vocab_size=320)
    make_tokenizer("bytes").save_pretrained(tmp_path)
    (tmp_path / "t.jinja").write_text(
        "{% for tool in tools or [] %}{{ tool }}{% endfor %}{{ messages[-1].content }}"
    )
    (tmp_path / "d.jsonl").write_text('{"prompt": "6*7?", "response": "42"}\n')
    settings = [
        f"model.path={tmp_path}",
        f"data.train={tmp_path}/d.jsonl",
        f"data.chat_template={tmp_path}/t.jinja",
    ]
    settings += [
        f"run.root={tmp_path}",
        "data.max_prompt_length=100",
        "rollout.max_response_length=9",
        "rollout.environment=tools",
    ]
    config = load_config(None, settings, Command.sft)
    monkeypatch.setattr(
        "grpo_megatron.commands.sft.open_run", lambda *_: pytest.fail("the prompt is taken for a short one")
    )
    with pytest.raises(
        UserError,
        match=r"d.jsonl:1 has \d+ prompt and 3 response tokens, more than data.max_prompt_length=100",
    ):
        sft(config)
    (problem,) = check(None, settings, Command.sft).violations
    assert "data.max_prompt_length=100" in problem
