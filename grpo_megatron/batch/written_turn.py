"""WrittenTurn: what a turn of the model says, as reasoning, text and tool calls."""

import json
import re
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpo_megatron.files import json_text

# The format that the templates of Hermes, Qwen2.5 and Qwen3 ask for. An unclosed tag is also a call.
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_THINK, _END_THINK = "<think>", "</think>"


@dataclass(frozen=True)
class WrittenCall:
    """A tool call that the model wrote. It may be malformed."""

    name: Any
    """Name of the tool. Any value if the call is malformed."""
    arguments: Any
    """Arguments of the call, a dict. Any value if the call is malformed."""
    id: str
    """Id of the call, by which the tool's answer names it. Formats such as Kimi's let the model write it."""
    problem: str | None = None
    """Why the call cannot be read; None if it can."""

    def __post_init__(self):
        if self.problem is None and not _has_json([self.name, self.arguments]):
            why = "the call has half of a character, such as \\ud83d, or lists that are nested too deeply"
            object.__setattr__(self, "problem", why)

    @property
    def is_valid(self) -> bool:
        """True if the call names a tool, and its arguments are an object."""
        return self.problem is None and isinstance(self.name, str) and isinstance(self.arguments, dict)

    @property
    def message(self) -> dict[str, Any]:
        """The call in the form that chat templates expect in `tool_calls`. The call must be valid."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


@dataclass(frozen=True)
class WrittenTurn:
    """A turn of the model, separated into its parts."""

    text: str
    """All that follows the reasoning, as the model wrote it, with the calls."""
    content: str
    """The text without the calls. What stands before, between and after them is kept."""
    reasoning: str | None = None
    """What the model thought, without the tags; None if the turn has no reasoning."""
    calls: tuple[WrittenCall, ...] = ()
    """The tool calls, with malformed ones, in their order. Empty if no tools were offered to the model."""
    is_cut: bool = False
    """True if the turn ended within its reasoning. It then has neither text nor calls."""

    @property
    def call_messages(self) -> list[dict[str, Any]]:
        """The calls in the form that chat templates expect; [] if one of them is malformed."""
        return [call.message for call in self.calls] if all(call.is_valid for call in self.calls) else []


def read_text(text: str, read: str, ids: Sequence[int], has_tools: bool) -> WrittenTurn:
    """Separate the text of a turn in the format of Hermes and Qwen3.

    Reasoning ends with `</think>`, and a call is `<tool_call>{"name": .., "arguments": ..}</tool_call>`.

    text: text of the turn, without its end token.
    read: end of what the model read before the turn. It may end with the tag that begins the reasoning.
    ids: number of tokens before the turn and the turn's token ids, of which the ids of the calls are made.
    has_tools: True if tools were offered to the model. If not, calls are part of the content.
    """
    begun = text.lstrip().startswith(_THINK) or read.rstrip().endswith(_THINK)
    thought, end, after = text.rpartition(_END_THINK)
    if begun and not end:
        return WrittenTurn("", "", text.lstrip().removeprefix(_THINK).strip(), is_cut=True)
    reasoning = thought.lstrip().removeprefix(_THINK).strip() if end else None
    if end:
        after = after.lstrip("\n")
    if not has_tools:
        return WrittenTurn(after, after, reasoning)
    written = _CALL.findall(after)
    calls = tuple(_call(one, id) for one, id in zip(written, call_ids(ids, len(written)), strict=True))
    content = _CALL.sub("", after).strip() if calls else after
    return WrittenTurn(after, content, reasoning, calls)


def _call(text: str, id: str) -> WrittenCall:
    try:
        call = json.loads(text)
        return WrittenCall(call["name"], call.get("arguments", {}), id)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        example = '{"name": "python", "arguments": {"code": "print(1+1)"}}'
        return WrittenCall(None, None, id, f"a call must be JSON such as {example}")


def _has_json(value: Any) -> bool:
    """Return True if a value that the model wrote can be written as JSON in UTF-8."""
    try:
        return bool(json_text(value, ensure_ascii=False).encode())
    except (TypeError, ValueError, RecursionError):
        return False


def call_ids(ids: Sequence[int], number: int) -> list[str]:
    """Return ids for the tool calls of a turn: nine letters and digits, as Mistral's templates require.

    Some templates show the ids to the model, so a turn that is sampled again must get the same ones.

    ids: number of tokens that the model read before the turn, and the token ids of the turn.
    number: number of calls.
    """
    known = zlib.crc32(array("q", list(ids)).tobytes()) if number else 0
    return [f"{zlib.crc32(bytes(index + 1), known):08x}{index % 10}" for index in range(number)]
