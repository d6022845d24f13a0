"""Trials: short chats as a chat template writes them, for comparing a renderer with the template."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from grpo_megatron.batch.written_turn import WrittenCall, WrittenTurn
from grpo_megatron.data.chat_template import ChatTemplate, Turn
from grpo_megatron.errors import UserError

# Function that returns the token ids of exactly the given text.
Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Trial:
    """A chat with one turn of the model, and the token ids that the chat template makes of it."""

    read_ids: list[int]
    """Token ids before the turn."""
    turn_ids: list[int]
    """Token ids of the turn, with those that end it."""
    next_ids: list[int] | None
    """All token ids up to the beginning of the next turn, after `messages`. They begin with `read_ids` and
    `turn_ids`. None if the template changes the turn when messages follow, such as by dropping reasoning."""
    content: str
    """Text of the turn."""
    reasoning: str
    """Reasoning of the turn; "" if it has none."""
    calls: list[tuple[str, dict[str, Any]]]
    """(name, arguments) of each tool call of the turn."""
    messages: list[dict[str, Any]]
    """Messages that follow the turn."""
    tools: list[dict[str, Any]]
    """JSON schemas of the tools that the turn calls."""

    def is_read_as(self, turn: WrittenTurn) -> bool:
        """Return True if a turn that was read has the same parts as the trial."""
        calls = [(call.name, call.arguments) for call in turn.calls if call.is_valid]
        found = (turn.content.strip(), (turn.reasoning or "").strip(), calls, len(turn.calls))
        return found == (self.content, self.reasoning, self.calls, len(self.calls))


def _schema(name: str, **properties: str) -> dict[str, Any]:
    parameters = {key: {"type": kind, "description": key} for key, kind in properties.items()}
    function = {
        "name": name,
        "description": f"The tool {name}.",
        "parameters": {"type": "object", "properties": parameters, "required": list(parameters)},
    }
    return {"type": "function", "function": function}


# JSON schemas of the tools in the trials.
TOOLS = [_schema("add", a="integer", b="integer"), _schema("say", text="string")]
_ADD, _SAY = ("add", {"a": 1, "b": 2}), ("say", {"text": 'so "it" is\n{3}'})
_ASKED, _AGAIN = {"role": "user", "content": "Add 1 and 2."}, {"role": "user", "content": "Once more."}
# (content, reasoning, calls) of the turns. Each is tried with the messages that can follow it.
_TURNS: list[tuple[str, str, list[tuple[str, dict[str, Any]]]]] = [
    ("It is 3.", "", []),
    ("It is 3.", "I add.", []),
    ("Let me see.", "", [_ADD]),
    ("", "", [_ADD]),
    ("", "", [_ADD, _SAY]),
    ("Let me see.", "I add.", [_ADD]),
    ("", "I add.", [_ADD]),
    ("", "I add.", [_ADD, _SAY]),
]
# Ids of calls. In Kimi's format, the model writes the id. Mistral's templates require nine characters.
_ID_FORMS = ("functions.{name}:{index}", "call0000{index}")


def trials(template: ChatTemplate, encode: Encode) -> list[Trial]:
    """Return the trials that the template can render completely.

    encode: returns the token ids of exactly the given text.
    """
    found = []
    for content, reasoning, calls in _TURNS:
        for form in _ID_FORMS:
            ids = [form.format(name=name, index=index) for index, (name, _) in enumerate(calls)]
            try:
                found.append(_trial(template, encode, content, reasoning, calls, ids))
                break
            except UserError:
                continue  # the template cannot show such a turn
    return found


def _trial(
    template: ChatTemplate,
    encode: Encode,
    content: str,
    reasoning: str,
    calls: list[tuple[str, dict[str, Any]]],
    ids: list[str],
) -> Trial:
    """Return the trial of one turn.

    content, reasoning, calls: parts of the turn.
    ids: ids of the calls.

    Raises UserError if the template cannot show the turn completely.
    """
    turn: dict[str, Any] = {"role": "assistant", "content": content or None}
    if reasoning:
        turn["reasoning_content"] = reasoning
    if calls:
        turn["tool_calls"] = [
            WrittenCall(name, arguments, id).message for (name, arguments), id in zip(calls, ids, strict=True)
        ]
    answers = [{"role": "tool", "tool_call_id": id, "content": "3"} for id in ids]
    messages = answers or [_AGAIN]
    written, following = _rendered(template, turn, messages)
    if not all(part in written.text for part in (content, reasoning, *(name for name, _ in calls))):
        raise UserError("the template leaves out a part of the turn")
    read, turn_ids, behind = encode(written.before), encode(written.text), encode(following or "")
    if written.is_closed:
        turn_ids += encode(written.closing)
    else:
        # In such formats, the model ends its turn with the token that begins the next message.
        turn_ids, behind = turn_ids + behind[:1], behind[1:]
    next_ids = None if following is None else [*read, *turn_ids, *behind]
    return Trial(read, turn_ids, next_ids, content, reasoning, calls, messages, TOOLS)


def _rendered(
    template: ChatTemplate, turn: dict[str, Any], messages: list[dict[str, Any]]
) -> tuple[Turn, str | None]:
    """Return (turn, text after it up to the next turn) as the template writes them.

    The text is None if the template writes the turn differently when messages follow.

    turn: a message of the model.
    messages: messages that follow it.

    Raises UserError if the template fails, or does not show all of the turn.
    """
    where, tools = "a trial", TOOLS if template.shows_tools and not template.tools else None
    asked = template.render([_ASKED], where, tools, generation=False)
    begun = template.render([_ASKED], where, tools)
    whole = template.render([_ASKED, turn], where, tools, generation=False)
    if not (begun.startswith(asked) and whole.startswith(asked)):
        raise UserError(f"{where}: the template changes the question")
    # The beginning of a turn, such as its role. A template that always thinks begins the next turn with a
    # tag that a finished turn may lack.
    both = zip(begun[len(asked) :], whole[len(asked) :], strict=False)
    header = "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], both))
    header = header[: header.rfind("<")] if header.rfind("<") > header.rfind(">") else header
    before = asked + header
    written = template.split_from_end(before, whole[len(before) :], where)
    full = template.render([_ASKED, turn, *messages], where, tools)
    shown = f"{before}{written.text}{written.closing}"
    return written, full.removeprefix(shown) if full.startswith(shown) else None
