"""Tokens of a response for supervised training, and a mask of the tokens that the model has to write."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo_megatron.data.chat_template import Turn
from grpo_megatron.data.messages import chat_in_text, chat_messages, written_beside_content
from grpo_megatron.data.tokenizer import PromptTokenizer, Tools
from grpo_megatron.data.values import shown
from grpo_megatron.errors import UserError


@dataclass(frozen=True)
class Asked:
    """The prompt of a supervised example, which the response answers."""

    text: str
    """Text of the prompt."""
    messages: list[dict[str, Any]] | None
    """The chat from which `text` was rendered, or None if the prompt is not a chat."""
    tools: Tools
    """JSON schemas of the tools that the record offers to the model, or None."""


def written(
    tokenizer: PromptTokenizer, asked: Asked, response: Any, where: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return (ids, mask) of a response: the tokens after the prompt, and which of them are trained on.

    - ids: int32 [R]. The ids are the same as in an episode with rollout.history=append and the same chat.
    - mask: bool [R], True for tokens that the model has to write.

    asked: the prompt.
    response: one turn of the model as text, or a list of messages, which the chat template renders. The first
        and the last message must be the assistant's.
    where: the record and its field, for error messages.

    Raises UserError if the response is invalid, or if the chat template cannot show it completely.
    """
    parts = [
        (ids, by_model)
        for ids, by_model in _parts(tokenizer, asked, _checked_response(response, where), where)
        if len(ids)
    ]
    mask = np.concatenate([np.full(len(ids), by_model, dtype=np.bool_) for ids, by_model in parts])
    return np.concatenate([ids for ids, _ in parts]), mask


def _checked_response(response: Any, where: str) -> str | list[dict[str, Any]]:
    """Return the response as text, or as a list of messages that continues the prompt's chat.

    response: value of the record's field.
    where: the record and its field, for error messages.

    Raises UserError if the value is neither of the two.
    """
    if isinstance(response, str):
        response = chat_in_text(response, where) or response
    if isinstance(response, str):
        return response
    legal = isinstance(response, list) and response and all(isinstance(message, dict) for message in response)
    messages = chat_messages(response, where, "response") if legal else []
    if not messages or {messages[0]["role"], messages[-1]["role"]} != {"assistant"}:
        raise UserError(
            f"{where} must be a string, or a list of messages with role and content whose first and last "
            f"message are the assistant's, but is {shown(response)}"
        )
    return messages


def _parts(
    tokenizer: PromptTokenizer, asked: Asked, response: str | list[dict[str, Any]], where: str
) -> Iterator:
    """Yield the parts of a response in order: parts that the model writes, and parts that it only reads.

    asked: the prompt.
    response: as `_checked_response` returned it.

    Yields (int32 token ids of the part, True if the model writes them).
    """
    if isinstance(response, str):
        yield _turn_part(tokenizer, _text_turn(tokenizer, asked, response), where)
    elif asked.messages is None:
        yield from _plain_parts(tokenizer, asked, response, where)
    else:
        yield from _chat_parts(tokenizer, asked, response, where)


def _text_turn(tokenizer: PromptTokenizer, asked: Asked, text: str) -> Turn:
    """Return a turn in which the model writes a plain string, as a Turn.

    If the string ends with the end token, as in some data sets, this token is left out of the turn's text,
    because a turn gets its end separately.

    asked: the prompt before the turn.
    text: the string.
    """
    template, closing, is_closed = tokenizer.template, "", False
    if template:
        closing, is_closed = template.shape.closing, template.shape.is_closed
    if asked.messages is not None and not (
        asked.messages[-1]["role"] == "assistant" and asked.messages[-1]["content"]
    ):
        text = template.text_behind(asked.text, text)
    end = closing if is_closed else tokenizer.tokenizer.eos_token
    if end and text.rstrip().endswith(end):  # some data sets include the end token in their texts
        text = text.rstrip().removesuffix(end)
    return Turn(asked.text, text, closing, is_closed)


def _turn_part(tokenizer: PromptTokenizer, turn: Turn, where: str) -> tuple[np.ndarray, bool]:
    """Return (int32 token ids, True) of a turn of the model. The ids include the end token.

    The True marks the tokens as written by the model.
    """
    text = tokenizer.encode_behind(turn.before, turn.text)
    return np.concatenate([text, tokenizer.closing(turn.closing, turn.is_closed, where)]), True


def _plain_parts(
    tokenizer: PromptTokenizer, asked: Asked, response: list[dict[str, Any]], where: str
) -> Iterator:
    """Yield the parts of a list of messages after a prompt that is not a chat.

    The contents of the messages are used verbatim, because there is no chat to which a template could be
    applied. Yields (int32 token ids of a message, True if the model writes them).

    Raises UserError if a message has tool calls or reasoning, which only a chat template can render.
    """
    before = asked.text
    for message in response:
        if beside := written_beside_content(message):
            raise UserError(
                f"{where} has a message with {beside[0]}, which only a chat template can render, but the "
                "prompt is not a chat; give the prompt as a list of messages"
            )
        text = message["content"]
        if message["role"] == "assistant":
            yield _turn_part(tokenizer, _text_turn(tokenizer, Asked(before, None, None), text), where)
        else:
            yield tokenizer.encode_behind(before, text), False
        before = text


def _chat_parts(
    tokenizer: PromptTokenizer, asked: Asked, response: list[dict[str, Any]], where: str
) -> Iterator:
    """Yield the parts of a list of messages that continues a chat: assistant turns and the text between them.

    If the prompt's chat ends with an assistant message, the first message of the response continues that
    message.

    asked: the prompt, which is a chat.
    response: the list of messages.

    Yields (int32 token ids of the part, True if the model writes them).
    """
    template, chat, begun = tokenizer.template, list(asked.messages), ""
    if chat[-1]["role"] == "assistant":
        begun = chat.pop()["content"]
        response = [{**response[0], "content": begun + (response[0]["content"] or "")}, *response[1:]]
    earlier, between = None, []
    for message in response:
        chat.append(message)
        if message["role"] != "assistant":
            between.append(message)
            continue
        turn = template.turn(chat, where, asked.tools, begun if earlier is None else "")
        if earlier is not None:
            yield _between(tokenizer, earlier, turn, between, asked.tools), False
            between = []
        yield _turn_part(tokenizer, turn, where)
        earlier = turn


def _between(
    tokenizer: PromptTokenizer, earlier: Turn, turn: Turn, messages: list[dict[str, Any]], tools: Tools
) -> np.ndarray:
    """Return the int32 token ids between two assistant turns.

    They contain the messages between the turns, and the beginning of the second turn. The end of the first
    turn is not among them.

    earlier, turn: the two turns.
    messages: the messages between the two turns.
    """
    behind = f"{earlier.before}{earlier.text}{earlier.closing}"
    if turn.before.startswith(behind):
        return tokenizer.encode_behind(behind, turn.before[len(behind) :])
    # The template now shows the earlier turn in another form, usually without its reasoning. An episode with
    # rollout.history=append keeps what the model wrote, so the text between the turns is rendered on its own.
    ids = np.array(tokenizer.turn_format.after_turn(messages, tools), dtype=np.int32)
    end = tokenizer.encode(tokenizer.template.shape.closing)
    return ids[len(end) :] if np.array_equal(ids[: len(end)], end) else ids
