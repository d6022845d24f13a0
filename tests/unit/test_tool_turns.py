"""Episodes with tools: calls are read in the model's own format, and the next turn follows their answers."""

import asyncio

import numpy as np
import pytest

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.written_turn import WrittenCall, WrittenTurn
from grpo_megatron.config.reward import RewardConfig
from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.rollout.episodes import MultiTurn
from grpo_megatron.rollout.tool_environment import ToolCalls
from grpo_megatron.rollout.trajectory import Episode
from tests.unit.test_renderers import ASKED, renderer_of, turn_of
from tests.unit.test_trajectories import Writer
from tests.unit.test_turn_format import ANSWER, STRICT, TOOLS, ids_of, of_template, qwen3


def add(a, b):
    return a + b


@pytest.mark.parametrize("name", ["qwen3.5", "glm-4.5", "minimax-m2", "kimi-k2", "deepseek-v3"])
def test_calls_are_run_in_the_format_of_the_model(name):
    """They were read in the format of Hermes alone, so most models could not call a tool."""
    found, made = renderer_of(name)
    call = WrittenCall("add", {"a": 1, "b": 2}, "functions.add:0").message
    turn = {"role": "assistant", "content": "Let me see.", "tool_calls": [call]}
    answer = {"role": "tool", "tool_call_id": "functions.add:0", "content": "3"}
    read, wrote = turn_of(made, [ASKED], turn, answer)
    parts = found.turn(wrote, read, TOOLS)
    result = asyncio.run(ToolCalls({"add": add}, 10.0).step(made._tokenizer.decode(wrote), parts))
    assert result.observation == [{"role": "tool", "content": "3", "tool_call_id": parts.calls[0].id}]
    assert (result.done, result.components) == (False, {"tool_calls": 1, "failed_tool_calls": 0})


def test_a_malformed_call_is_answered_with_its_problem():
    calls = (WrittenCall(None, None, "a", "the call is malformed"), WrittenCall("add", {"a": 1, "b": 2}, "b"))
    result = asyncio.run(ToolCalls({"add": add}, 10.0).step("", WrittenTurn("", "", None, calls)))
    assert [message["content"] for message in result.observation] == ["error: the call is malformed", "3"]
    assert result.components == {"tool_calls": 2, "failed_tool_calls": 1}
    assert not any("tool_call_id" in message for message in result.observation)  # no template shows the call


class Tools:
    """The environment of tools, in the test's process."""

    def __init__(self, tokenizer):
        self.tools, self.decode, self.closed = ToolCalls({"add": add}, 10.0), tokenizer.decode, 0

    def episode(self, prompt):
        return self

    async def reset(self, seed):
        return ""

    async def step(self, response_ids, *parts):
        return self.decode(response_ids), await self.tools.step(self.decode(response_ids), *parts)

    async def text(self, ids):
        return self.decode(ids)

    async def close(self):
        self.closed += 1


def play(tokenizer, text, *turns):
    """Return (samples, the requests to the engine) of an episode with tools."""
    ids, messages = tokenizer.encode(text), [{"role": "user", "content": "a"}]
    writer = Writer([ids_of(tokenizer, turn) for turn in turns])
    prompt = Prompt(7, ids, text, "3", messages=messages, tools=TOOLS)
    rollout = RolloutConfig(max_turns=4)
    players = MultiTurn(Tools(tokenizer), tokenizer, rollout, RewardConfig(), 0, reads_calls=True)
    samples = asyncio.run(players.play(Episode(prompt, 3, 0, 400, (0, 0)), writer))
    return samples, writer.requests


def test_an_episode_goes_on_after_the_calls_of_a_turn(tmp_path):
    """A template that looks for the call before a tool's answer failed, and with it the run."""
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    tokenizer = of_template(tmp_path, STRICT)
    (sample,), requests = play(tokenizer, "(add)<user>a<end><assistant>", f"so {call}<call>", "it is 3<end>")
    read = tokenizer.decode_all(np.array(requests[1][0]))
    assert read == f"(add)<user>a<end><assistant>so {call}<call><tool>add:3<end><assistant>"
    assert (sample.turns, sample.reward_components) == (2, {"tool_calls": 1, "failed_tool_calls": 0})


def test_an_episode_goes_on_by_the_renderer(tmp_path):
    tokenizer = qwen3(tmp_path)
    assert tokenizer.turn_format.renderer.continues
    asked = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    thought = f"<think>\nnot {call}\n</think>\n\n"
    (sample,), requests = play(tokenizer, asked, f"{thought}{call}<|im_end|>", f"{thought}It is 3.<|im_end|>")
    answer = f"\n<|im_start|>user\n<tool_response>\n{ANSWER['content']}\n</tool_response><|im_end|>\n"
    assert tokenizer.decode_all(np.array(requests[1][0])) == (
        f"{asked}{thought}{call}<|im_end|>{answer}<|im_start|>assistant\n"
    )
    assert (sample.turns, sample.reward_components) == (2, {"tool_calls": 1, "failed_tool_calls": 0})
