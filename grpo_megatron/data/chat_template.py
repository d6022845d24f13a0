"""Chat templates: rendering messages as text, and finding the part of that text that the model writes."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from grpo_megatron.data.messages import (
    CALL_KEYS,
    REASONING_KEYS,
    call_arguments,
    called_function,
    written_beside_content,
)
from grpo_megatron.errors import UserError
from grpo_megatron.files import json_text

_WORD = "response"
_QUESTION = {"role": "user", "content": "prompt"}
# A tag at the end of a text, and the white space after it. The templates of models that always think begin
# the model's turn with <think>.
_LAST_TAG = re.compile(r"(<[^<>\s]+>)(\s*)\Z")


@dataclass(frozen=True)
class TurnShape:
    """The text that a chat template puts around a turn (a message) of the model."""

    lead: str
    """White space between the beginning of a turn and its text, such as the space after Mistral's [/INST]."""
    tail: str
    """Everything after the turn's text in a finished conversation, such as `<|im_end|>` and a line break."""
    closing: str
    """The part of `tail` that the model has to write. It ends with the first added token of the tokenizer in
    `tail`, such as `<|im_end|>`. If there is no such token, it is all of `tail` but the white space at the
    end."""
    is_closed: bool
    """True if `closing` ends with an added token. If False, the tokenizer's end token must follow
    `closing`."""


@dataclass(frozen=True)
class Turn:
    """One turn (a message) of the model in a chat, as text."""

    before: str
    """Text of the whole chat before the turn, as the template renders it."""
    text: str
    """The text that the model writes, without `closing`."""
    closing: str
    """The text that the model writes to end the turn, such as `<|im_end|>`. May be empty."""
    is_closed: bool
    """True if `closing` ends the turn. If False, the tokenizer's end token has to follow `closing`."""


class ChatTemplate:
    """A chat template, with the arguments and the tools that are passed to it whenever it renders a chat.

    The object renders chats as text, and finds the part of the text that the model writes.

    arguments, tools: see the constructor
    knows_developer: True if the template has a case for the role `developer`
    added_tokens: texts of the tokenizer's added tokens, such as `<|im_end|>`, the longest first.
    """

    def __init__(
        self, tokenizer, text: str | None, arguments: dict[str, Any], tools: Sequence[dict[str, Any]] = ()
    ):
        """Compile the template, and check that it uses all arguments.

        tokenizer: a tokenizer of transformers.
        text: a Jinja template to use instead of the tokenizer's own. If None, the tokenizer's own is used.
        arguments: data.chat_template_args, which are passed to the template whenever it renders a chat.
        tools: JSON schemas of the functions that the environment offers to the model in every chat.

        Raises UserError if the template cannot be compiled, or if it does not use one of the arguments.
        """
        self._tokenizer, self._text, self.arguments, self.tools = tokenizer, text, arguments, list(tools)
        source = tokenizer.chat_template if text is None else text
        self._names, self.knows_developer = _names_read(source), "developer" in str(source)
        unread = sorted(set(arguments) - self._names)
        if unread:
            raise UserError(
                f"data.chat_template_args: the chat template does not use {', '.join(unread)}; remove this "
                f"setting (the template uses {', '.join(sorted(self._names))})"
            )
        added = [str(token) for token in tokenizer.added_tokens_decoder.values()]
        self.added_tokens = sorted(
            {*filter(str.strip, added), *filter(None, [tokenizer.eos_token])}, key=len, reverse=True
        )

    @property
    def shows_tools(self) -> bool:
        return "tools" in self._names

    def render(
        self,
        messages: list[dict[str, Any]],
        where: str,
        tools: list[dict[str, Any]] | None = None,
        generation: bool = True,
    ) -> str:
        """Return the text of a whole chat, as the template renders it.

        where: place of the record, for error messages.
        tools: JSON schemas of the tools that the record offers to the model. If there are none, the template
            shows the environment's tools.
        generation: True to append the beginning of the model's next turn (the generation prompt).

        Raises UserError if the template fails, or if it cannot show the tools or a message's tool calls.
        Raises UserError also if both the record and the environment offer tools.
        """
        if tools and self.tools:
            raise UserError(
                f"{where}: the record (data.tools_key) and the environment both offer tools; set "
                "data.tools_key=null to offer only the environment's tools"
            )
        if tools and not self.shows_tools:
            raise UserError(
                f"{where}: the record offers tools (data.tools_key), which the chat template does not show "
                "to the model; use a template that reads `tools`, or set data.tools_key=null"
            )
        for message in messages:
            if message.get("tool_calls") and not self._call_forms:
                raise UserError(f"{where}: a message has tool_calls, {_LEFT_OUT}")
        try:
            return self._apply(
                [self._in_call_form(message) for message in messages], tools or self.tools, generation
            )
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
        except Exception as error:  # a template is a program and can fail in any way
            raise UserError(
                f"{where}: the chat template failed: {type(error).__name__}: {error}; correct the record or "
                "change data.chat_template"
            ) from error

    def _apply(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], generation: bool) -> str:
        arguments = {"add_generation_prompt": True, **self.arguments}
        if tools:
            arguments = {"tools": tools, **arguments}
        if not generation:
            arguments["add_generation_prompt"] = False
        return self._tokenizer.apply_chat_template(
            messages, chat_template=self._text, tokenize=False, **arguments
        )

    def prompt(
        self, messages: list[dict[str, Any]], where: str, tools: list[dict[str, Any]] | None = None
    ) -> str:
        """Return the text of a prompt that is a chat, up to the place where the model continues.

        If the chat ends with an assistant message, the model continues this message, and the text ends with
        the message's content. Otherwise, the text ends with the beginning of the model's turn.

        where: place of the record, for error messages.
        tools: JSON schemas of the tools that the record offers to the model.

        Raises UserError if the chat cannot be rendered. Raises UserError also for an assistant message at the
        end that has tool calls or reasoning, or that is the chat's only message.
        """
        *earlier, last = messages
        if last["role"] != "assistant":
            return self.render(messages, where, tools)
        if beside := written_beside_content(last):
            raise UserError(
                f"{where}: the prompt ends with an assistant message that has {beside[0]}, so it cannot be "
                "continued; end the prompt with the message that the model is to answer, or with the "
                "beginning of an answer in plain text"
            )
        if not earlier:
            raise UserError(
                f"{where}: the prompt contains only an assistant message; add the message that it answers "
                "before it"
            )
        before = self.render(earlier, where, tools)
        return before + self.text_behind(before, last["content"])

    def text_behind(self, before: str, text: str) -> str:
        """Return the text of a turn of the model, changed so that it can be appended to the chat before it.

        If `before` already ends with a tag that `text` begins with, such as <think>, the tag is removed from
        `text`. Otherwise, if the template begins every turn with white space, this white space is put in
        front of `text`, unless `text` begins with white space itself. Empty text stays empty.

        before: text of the rendered chat, up to the beginning of a turn of the model.
        text: what the model writes in this turn, or the beginning of it.
        """
        if not text:
            return text
        tag = _LAST_TAG.search(before)
        if tag and text.startswith(tag[1]):
            return text.removeprefix(tag[1]).removeprefix(tag[2])
        return text if text[0].isspace() else self.shape.lead + text

    @cached_property
    def shape(self) -> TurnShape:
        """The text that the template puts around a finished turn of the model.

        It is found by rendering a trial chat.

        Raises UserError if the template fails for the trial chat, or if it leaves out the assistant's
        message.
        """
        where = "a finished conversation"
        text = self.render([_QUESTION, {"role": "assistant", "content": _WORD}], where, generation=False)
        if _WORD not in text:
            raise UserError(
                "the chat template leaves out the assistant's messages, so there is nothing to score or to "
                "train on; change data.chat_template"
            )
        start = text.rindex(_WORD)
        before, tail = self.render([_QUESTION], where), text[start + len(_WORD) :]
        lead = text[len(before) : start] if text.startswith(before) else ""
        ends = [
            (tail.index(token) + len(token), tail.index(token))
            for token in self.added_tokens
            if token in tail
        ]
        end = min(ends, key=lambda found: (found[1], -found[0]))[0] if ends else len(tail.rstrip())
        return TurnShape(lead if lead.isspace() else "", tail, tail[:end], bool(ends))

    def turn(
        self, messages: list[dict[str, Any]], where: str, tools: list[dict[str, Any]] | None, begun: str = ""
    ) -> Turn:
        """Return the text that the model would have to write as the last message of a chat, as a Turn.

        The last message must be the assistant's. The Turn separates three texts: the chat before this
        message, the text that the model writes in the message, and the text with which the model ends the
        message.

        where: place of the record, for error messages.
        tools: JSON schemas of the tools that the record offers to the model.
        begun: beginning of the message's content, if the prompt already contains it. The model then writes
            only the rest.

        Raises UserError if the template leaves out a part of the message, or if the rendered text does not
        show where the turn begins or ends.
        """
        *earlier, last = messages
        before = self.render(earlier, where, tools)
        before += self.text_behind(before, begun)
        whole = self.render(messages, where, tools, generation=False)
        for key in written_beside_content(last):
            if whole == self._rendered_without(key, messages, where, tools):
                raise UserError(f"{where}: an assistant message has {key}, {_LEFT_OUT}")
        if not whole.startswith(before):
            raise UserError(
                f"{where}: the model's part of the text cannot be found, because the chat template renders "
                "the prompt differently when the assistant's message follows (without it, the prompt ends "
                f"with {before[-40:]!r}); give the response as a string, or change data.chat_template or "
                "data.chat_template_args"
            )
        if _squeezed(last["content"] or "") not in _squeezed(begun + whole[len(before) :]):
            raise UserError(
                f"{where}: the chat template drops part of an assistant message's content, such as the "
                "thinking before </think>; give the response as a string, or change data.chat_template"
            )
        return self.split_from_end(before, whole[len(before) :], where)

    def _rendered_without(self, key: str, messages: list[dict[str, Any]], where: str, tools) -> str | None:
        """Return the text of the chat without `key` in its last message, or None if the template then fails.

        The text tells whether the template shows the key: if not, the text of the complete chat is the same.

        key: key of the last message, such as `tool_calls`.
        where, tools: as in `render`.
        """
        last = {name: value for name, value in messages[-1].items() if name != key}
        try:
            return self.render(
                [*messages[:-1], {**last, "content": last["content"] or ""}], where, tools, generation=False
            )
        except UserError:
            return None  # the template at least reads the key

    def split_from_end(self, before: str, text: str, where: str) -> Turn:
        """Return a rendered turn of the model as a Turn, which separates the end of the turn from its text.

        before: text of the rendered chat before the turn.
        text: text of the rendered turn, up to the end of the chat.
        where: place of the record, for error messages.

        Raises UserError if `text` ends neither with the text that ends turns in this template (`shape.tail`)
        nor with an added token of the tokenizer.
        """
        shape = self.shape
        if text.endswith(shape.tail):
            return Turn(before, text[: len(text) - len(shape.tail)], shape.closing, shape.is_closed)
        text = text.rstrip()
        # Some templates end turns that contain calls with another token.
        closing = next((token for token in self.added_tokens if text.endswith(token)), None)
        if closing is None:
            raise UserError(
                f"{where}: the end of the model's turn cannot be found, because the chat template usually "
                f"ends it with {shape.tail!r}, but ends this turn with {text[-40:]!r}, which is not a "
                "special token; change data.chat_template"
            )
        return Turn(before, text.removesuffix(closing), closing, True)

    @cached_property
    def _call_forms(self) -> list[tuple[str | None, type]]:
        """Forms of a message with tool calls that this template renders correctly, the preferred form first.

        A form is a pair (content, kind):

        - content: content of a message that has only tool calls: None or "". Some templates print None as
          "None". Others show the calls only if the content is None.
        - kind: type of a call's arguments: dict, or str for JSON text. Some templates quote JSON text a
          second time. Others fail if the arguments are a dict.
        """
        return [form for form in product((None, ""), (dict, str)) if self._shows_calls(*form)]

    def _shows_calls(self, content: str | None, kind: type) -> bool:
        """Return True if the template correctly renders a trial chat with a tool call of this form.

        content: content of the message with the call: None or "".
        kind: type of the call's arguments: dict, or str for JSON text.
        """
        arguments: Any = {"key": _WORD}
        function = {"name": "lookup", "arguments": arguments if kind is dict else json_text(arguments)}
        call = {"id": "call00001", "type": "function", "function": function}
        asked = {"role": "assistant", "content": content, "tool_calls": [call]}
        answer = {"role": "tool", "name": "lookup", "tool_call_id": call["id"], "content": "1"}
        schema = {
            "name": "lookup",
            "description": "",
            "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
        }
        tools = [{"type": "function", "function": schema}]
        try:
            before = self._apply([_QUESTION], tools, False)
            text = self._apply([_QUESTION, asked, answer], tools, False)
        except Exception:  # a template is a program and can fail in any way
            return False
        prints_nothing = any(text.count(word) > before.count(word) for word in ("None", "null"))
        return _WORD in text and not prints_nothing and f'\\"{_WORD}' not in text

    def _in_call_form(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the message in a form that the template renders correctly (see `_call_forms`).

        Content that is None may become "", and a tool call's arguments may change between a dict and JSON
        text. Raises UserError if the arguments must be a dict but cannot be converted.
        """
        if not message.get("tool_calls"):
            return message if message["content"] is not None else {**message, "content": ""}
        given = called_function(message["tool_calls"][0]).get("arguments", {})
        forms = self._call_forms
        content, kind = next((form for form in forms if form[1] is type(given)), forms[0])
        calls = []
        for call in message["tool_calls"]:
            function = called_function(call)
            function = {**function, "arguments": call_arguments(function.get("arguments", {}), kind)}
            calls.append({**call, "function": function} if "function" in call else function)
        return {**message, "content": message["content"] or content, "tool_calls": calls}


def _squeezed(text: str) -> str:
    """Return the text without any white space, for comparisons, because templates may change white space."""
    return "".join(text.split())


_LEFT_OUT = (
    f"which the chat template leaves out; set data.chat_template to a template that shows {CALL_KEYS[0]} or "
    f"{REASONING_KEYS[0]}, or give the response as a string"
)


def _names_read(template: str | dict[str, str]) -> set[str]:
    """Return the names of the variables that a chat template uses without defining them itself.

    template: the template's text, or the dict of named templates that some tokenizers have.

    Raises UserError if a template cannot be compiled.
    """
    from jinja2 import TemplateError, meta
    from transformers.utils.chat_template_utils import _compile_jinja_template

    names: set[str] = set()
    for text in template.values() if isinstance(template, dict) else [template]:
        try:
            # Use the environment in which transformers renders the template: it has tags that Jinja itself
            # lacks.
            environment = _compile_jinja_template(text).environment
        except TemplateError as error:
            raise UserError(
                f"the chat template is not valid Jinja: {type(error).__name__}: {error}; correct it or "
                "change data.chat_template"
            ) from error
        names |= meta.find_undeclared_variables(environment.parse(text))
    return names
