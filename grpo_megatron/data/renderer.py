"""TurnRenderer: reads and continues the model's turns with the package `renderers`.

The package knows the formats of many model families: how a family writes reasoning and tool calls, and what
stands between two turns. It finds the format of a model by the name of its repository. Names mislead: a
repository changes its chat template, and a fine-tuned model has a name of its own. Here, a renderer is used
for what it has been proven to do as the model's own chat template does, see renderer_trials.py.
"""

import json
import logging
from collections.abc import Sequence
from typing import Any

from grpo_megatron.batch.written_turn import WrittenCall, WrittenTurn, call_ids
from grpo_megatron.data.renderer_trials import Trial

logger = logging.getLogger(__name__)

# Special tokens without which a renderer is not even constructed. This one would try a download.
_NEEDED = {"gpt-oss": "<|channel|>"}


class TurnRenderer:
    """A renderer for one tokenizer. It reads turns as the model's chat template writes them.

    name: name of the renderer in the package
    continues: True if it is also proven to continue turns as the chat template does
    """

    def __init__(self, name: str, renderer: Any, tokenizer: Any, keeps_rest: bool = True):
        """Wrap a renderer that is not proven to do anything yet.

        renderer: a renderer of the package.
        tokenizer: the model's tokenizer, an object of transformers.
        keeps_rest: True to keep the text between and after calls, which most renderers leave out. False for
            a format that has text of its own there.
        """
        self.name, self.continues, self._keeps_rest = name, False, keeps_rest
        self._renderer, self._tokenizer = renderer, tokenizer
        self._stops, self._added = set(renderer.get_stop_token_ids()), set(tokenizer.added_tokens_decoder)

    def turn(self, ids: Sequence[int], read: Sequence[int], tools: Sequence[dict[str, Any]]) -> WrittenTurn:
        """Separate a turn of the model into its parts.

        ids: token ids of the turn.
        read: all token ids that the model read before it.
        tools: JSON schemas of the tools that were offered to the model. If there are none, calls are part of
            the content.
        """
        ids = list(ids)
        found = self._renderer.parse_response(ids, tools=list(tools) or None, prompt_ids=self._begun(read))
        if found.reasoning_complete is False:
            return WrittenTurn("", "", (found.reasoning_content or "").strip(), is_cut=True)
        end = next((place for place, one in enumerate(ids) if one in self._stops), len(ids))
        spans = [call.token_span for call in found.tool_calls]
        text = content = found.content.strip("\n")
        if spans and None not in spans:
            text = f"{content}{self._tokenizer.decode(ids[spans[0][0] : end])}"
            content = self._with_rest(content, ids[:end], spans) if self._keeps_rest else content.strip()
        if not tools:
            return WrittenTurn(text, text, found.reasoning_content)
        names = call_ids([len(read), *ids], len(spans))
        calls = tuple(_call(call, id) for call, id in zip(found.tool_calls, names, strict=True))
        return WrittenTurn(text, content, found.reasoning_content, calls)

    def _with_rest(self, content: str, ids: list[int], spans: list[tuple[int, int]]) -> str:
        """Return the content with the text between and after the calls.

        content: text before the calls.
        ids: token ids of the turn, without its end.
        spans: (first, last + 1) of the token ids of each call.
        """
        starts = [start for start, _ in spans[1:]]
        gaps = [ids[end:start] for (_, end), start in zip(spans, [*starts, len(ids)], strict=True)]
        texts = [
            self._tokenizer.decode([one for one in gap if one not in self._added]).strip() for gap in gaps
        ]
        return "\n".join(filter(None, [content.strip(), *(text for text in texts if text not in content)]))

    def continued(
        self,
        read: Sequence[int],
        ids: Sequence[int],
        messages: list[dict[str, Any]],
        tools: Sequence[dict[str, Any]],
    ) -> list[int] | None:
        """Return the token ids of a chat, continued after a turn up to the beginning of the next one.

        Returns None if the renderer cannot continue the turn with these messages, or if its result does not
        begin with exactly the given ids.

        read: all token ids that the model read before the turn.
        ids: token ids of the turn.
        messages: messages that follow the turn.
        tools: JSON schemas of the tools that the model may call.
        """
        begun, ids = self._begun(read), list(ids)
        try:
            bridged = self._renderer.bridge_to_next_turn(begun, ids, messages, tools=list(tools) or None)
        except Exception as error:  # the package raises many kinds, for messages that a format lacks
            logger.debug("renderer %s: %s: %s", self.name, type(error).__name__, error)
            return None
        if bridged is None or bridged.token_ids[: len(begun) + len(ids)] != [*begun, *ids]:
            return None
        return [*read, *ids, *bridged.token_ids[len(begun) + len(ids) :]]

    def _begun(self, read: Sequence[int]) -> list[int]:
        """Return the end of what the model read before a turn, from the end of the last message.

        A renderer looks at no more, but would copy all of it several times.
        """
        places = range(len(read) - 1, -1, -1)
        return list(read[next((at for at in places if read[at] in self._stops), 0) :])

    def reads(self, trial: Trial) -> bool:
        """Return True if the renderer reads the turn of a trial as it was given to the chat template."""
        try:
            found = self.turn(trial.turn_ids, trial.read_ids, trial.tools)
        except Exception as error:  # the package raises many kinds, for tokens that a format lacks
            logger.debug("renderer %s: %s: %s", self.name, type(error).__name__, error)
            return False
        return trial.is_read_as(found)


def _call(call: Any, id: str) -> WrittenCall:
    """Return a call of the package as a WrittenCall.

    A call of an unknown tool is valid, because the program that runs the tools answers it. So is one that
    has text where its schema wants another value.

    id: id of the call, if the model did not write one.
    """
    arguments = call.arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    written = WrittenCall(call.name, arguments, call.id or id)
    if written.is_valid and call.status != "unclosed_block":
        return written
    return WrittenCall(
        call.name, call.arguments, written.id, f"the call is malformed ({call.status.replace('_', ' ')})"
    )


def find_renderer(tokenizer: Any, tried: list[Trial], arguments: dict[str, Any]) -> TurnRenderer | None:
    """Return a renderer that reads each trial turn as the chat template wrote it, or None if there is none.

    A renderer that is also proven to continue turns is preferred.

    tokenizer: the model's tokenizer, an object of transformers.
    tried: the trials.
    arguments: data.chat_template_args.
    """
    readers = []
    for name, renderer in _candidates(tokenizer, arguments):
        wrapped = [TurnRenderer(name, renderer, tokenizer, keeps_rest) for keeps_rest in (True, False)]
        found = next((one for one in wrapped if all(map(one.reads, tried))), None)
        if found is None:
            continue
        continued = [trial for trial in tried if trial.next_ids]
        found.continues = bool(continued) and all(
            found.continued(trial.read_ids, trial.turn_ids, trial.messages, trial.tools) == trial.next_ids
            for trial in continued
        )
        if found.continues:
            return found
        readers.append(found)
    return readers[0] if readers else None


def _candidates(tokenizer: Any, arguments: dict[str, Any]):
    """Yield (name, renderer) of each renderer that can be constructed for the tokenizer.

    arguments: data.chat_template_args. A renderer gets those that it knows. For a switch that turns thinking
        on and off, which many templates set themselves, both values are tried.
    """
    from renderers import base, configs

    base._populate_registry()
    vocabulary = tokenizer.get_vocab()
    for name, made in base.RENDERER_REGISTRY.items():
        if name == "default" or _NEEDED.get(name, "") not in {"", *vocabulary}:
            continue
        known = configs._config_class_for(name).template_field_names()
        given = {key: value for key, value in arguments.items() if key in known}
        options = [given]
        if "enable_thinking" in known - given.keys():
            options += [given | {"enable_thinking": value} for value in (True, False)]
        for option in options:
            try:
                # "all": what the model has read stays, also what it thought before the last question.
                config = configs._config_class_for(name)(thinking_retention="all", **option)
                yield name, made(tokenizer, config)
            except Exception as error:  # it needs other special tokens, or refuses the option
                logger.debug("renderer %s: %s: %s", name, type(error).__name__, error)
