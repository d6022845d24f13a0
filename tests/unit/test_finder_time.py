"""Everything that searches a response takes time linear in its length."""

import asyncio
import time
from dataclasses import dataclass

import pytest

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.config.reward import RewardConfig
from grpo_megatron.config.sandbox import CodePlace
from grpo_megatron.rewards import resolve_reward
from grpo_megatron.rewards.answers import answer_key, boxed, find_letter, hashes, last_number
from grpo_megatron.rewards.fences import find_program
from grpo_megatron.rewards.limits import time_limit
from grpo_megatron.rollout.tool_environment import ToolEnvironment

# Bytes of a text, and CPU seconds that finding may take. A finder whose time grows with the square of the
# length needs some 5 s for 64 KiB and 20 minutes for a megabyte; the slowest one here needs 0.3 s and 4 s.
SIZES = [(2**16, 2.0), pytest.param(2**20, 20.0, marks=pytest.mark.slow)]


def letter(text):
    return find_letter(text, "ABCDEFGHIJ")


def program(text):
    return find_program(text, CodePlace.last_block)


def tags(text):
    reward = resolve_reward(RewardConfig(function="format"))
    return reward(prompt="", response=text, answer="", record={})


def tools(text):
    environment = ToolEnvironment(["examples.calculator:calculator"], RewardConfig())(Prompt(0, None, "", ""))
    return asyncio.run(environment.step(text))


@dataclass(frozen=True)
class repeated:
    """A text of any size that repeats `piece` between `before` and `after`, and `closing` equally often."""

    piece: str
    before: str = ""
    after: str = ""
    closing: str = ""

    def text(self, size):
        count = (size - len(self.before + self.after)) // len(self.piece + self.closing)
        return self.before + self.piece * count + self.closing * count + self.after


NUMBERS = [
    repeated("1"),
    repeated("1."),
    repeated("1,"),
    repeated("1,234,", after="5"),
    repeated("1,234 "),
    repeated(",234", before="1", after="5"),
    repeated("{,}234", before="1", after="5"),
    repeated("\\!,\\!"),
    repeated("-$"),
    repeated("-"),
    repeated("1e"),
    repeated("1-"),
    repeated("\u2212"),
    repeated("(", before="1,234"),
    repeated("(1,234 "),
    repeated("(1,234)"),
    repeated("\\left ", before="1,234"),
    repeated(" ", before="1,234\\left"),
    repeated(" ", before="(1,234"),
    repeated("\\", before="1,234"),
    repeated("{", before="1,234"),
    repeated("{}", before="1,234"),
    repeated("\\a", before="1,234"),
    repeated("a", before="1,234\\"),
]
TEXTS = {
    boxed: [
        repeated("\\boxed{"),
        repeated("\\boxed{", closing="}"),
        repeated("\\boxed{}"),
        repeated("\\boxed{ }"),
        repeated("\\boxed "),
        repeated(" ", before="\\boxed"),
        repeated("\\boxed{" + " " * 1000),
        repeated("{"),
        repeated("}"),
        repeated("{}"),
        repeated("\\"),
        repeated("\\\\boxed"),
        repeated("\\boxed1,"),
        repeated(".", before="\\boxed1"),
        repeated("\\{", before="\\boxed{"),
    ],
    hashes: [
        repeated("#"),
        repeated("####\n"),
        repeated("#### \n"),
        repeated(" ", before="####"),
        repeated("#### " * 9 + "\n"),
    ],
    last_number: NUMBERS,
    answer_key: [
        *NUMBERS,
        repeated(" "),
        repeated("~"),
        repeated("\\ "),
        repeated(" ."),
        repeated("$ "),
        repeated("\\", after="a"),
    ],
    letter: [
        repeated("answer "),
        repeated("answer is "),
        repeated("answer" + ":" * 60),
        repeated("answer" + " is" * 20),
        repeated(" ", before="answer is"),
        repeated("answer" + " " * 20 + "option" + " " * 20),
        repeated("\n"),
        repeated("\n*"),
        repeated("*"),
        repeated("_"),
        repeated("A"),
        repeated("A\n", after="b"),
        repeated("*", before="A", after="b"),
        repeated("*", before="\\boxed{", after="}"),
        repeated("*", before="<answer>"),
        repeated("<answer>"),
        repeated("\\text"),
        repeated("\\boxed{"),
    ],
    program: [
        repeated("```py"),
        repeated("```py\n"),
        repeated("```\n"),
        repeated("``` "),
        repeated("`"),
        repeated("~"),
        repeated("~~~ ```"),
        repeated(" " * 50 + "```"),
        repeated(" " * 50 + "```\n"),
        repeated(" ", before="```"),
        repeated(" ", before="```python\n"),
        repeated("a", before="```", after="`"),
        repeated("a ", before="```", after="`"),
        repeated("</a>", before="```python\n1```", after="."),
        repeated("``` </a>"),
        repeated("\n", before="```python\n", after="```"),
        repeated(" \n", before="```python\n", after="```"),
    ],
    tags: [
        repeated("<think>"),
        repeated("</think>", before="<think>"),
        repeated(" ", before="<think>a</think>"),
        repeated("a ", before="<think>", after="</think> so <answer>1</answer>"),
        repeated(" ", before="<think>a</think>", after=" so <answer>1</answer>"),
        repeated(" ", before="<think>", after="</think><answer>1</answer>"),
        repeated("<answer>", before="<think>1</think>"),
    ],
    tools: [
        repeated("<tool_call>"),
        repeated("<tool_call></tool_call>"),
        repeated("<tool_call>\n"),
        repeated("</tool_call>", before="<tool_call>"),
        repeated("</think>"),
        repeated("[", before="<tool_call>"),
        repeated('{"name":', before="<tool_call>"),
        repeated(" ", before="<tool_call>"),
        repeated("\\", before='<tool_call>"'),
        repeated("1", before="<tool_call>"),
    ],
}


CASES = [(find, text) for find, texts in TEXTS.items() for text in texts]


@pytest.mark.parametrize(("size", "seconds"), SIZES)
@pytest.mark.parametrize(
    ("find", "text"), CASES, ids=[f"{find.__name__}-{index}" for index, (find, _) in enumerate(CASES)]
)
def test_the_worst_texts(find, text, size, seconds):
    """30 KB of "```py" used to take the finder of programs 1.5 s, and 120 KB half a minute."""
    text = text.text(size)
    with time_limit(5 * seconds) as limit:
        start = time.process_time()
        find(text)
        seconds_taken = time.process_time() - start
    assert not limit.reached
    assert seconds_taken < seconds


@pytest.mark.slow
def test_math_verifys_own_search_ends_at_its_limit():
    """The library's patterns take quadratic time if brackets are not closed: 10 KB of them took 7 s."""
    reward = resolve_reward(RewardConfig(function="math"))
    start = time.monotonic()
    found = reward(prompt="", response="\\[" * 2**19, answer="7", record={})
    assert found == {"reward": 0.0, "timed_out": 1.0}
    assert time.monotonic() - start < 15
