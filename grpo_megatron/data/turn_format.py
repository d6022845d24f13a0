"""TurnFormat: how the model's turns in a chat are read, and how a chat goes on after a turn."""

import logging
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from grpo_megatron.batch.written_turn import WrittenTurn, read_text
from grpo_megatron.data.call_detector import CallDetector, find_detector
from grpo_megatron.data.chat_template import ChatTemplate
from grpo_megatron.data.decoder import Decoder
from grpo_megatron.data.messages import called_function
from grpo_megatron.data.renderer import TurnRenderer, find_renderer
from grpo_megatron.data.renderer_trials import Trial, trials
from grpo_megatron.errors import UserError

logger = logging.getLogger(__name__)

Tools = list[dict[str, Any]] | None

_STAND_IN = "-- the model's turn --"
# Number of tokens before a turn in which the tag can stand that begins its reasoning.
_LONGEST_TAG = 16


class TurnFormat:
    """The format of a model's turns. It separates a turn into its parts, and continues a chat after it."""

    def __init__(self, tokenizer: Any, template: ChatTemplate | None, decoder: Decoder):
        """Create the format of a model.

        tokenizer: the model's tokenizer, an object of transformers.
        template: the model's chat template, or None.
        decoder: function from token ids to text, without end tokens.
        """
        self._tokenizer, self._template, self._decoder = tokenizer, template, decoder
        self._added = frozenset(tokenizer.added_tokens_decoder)  # the tokenizer makes it anew each time

    def after_turn(
        self, messages: list[dict[str, Any]], tools: Tools = None, calls: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
        """Return the token ids that stand between two turns of the model in a chat.

        They consist of the end of the first turn, such as its end token, the messages between the two turns,
        and the beginning of the second turn.

        messages: the messages between the two turns, such as an environment's answer.
        tools: JSON schemas of the tools that the model may call.
        calls: tool calls of the first turn. Some templates end a turn with calls in another way, or fail if
            a tool answers without a call.

        Raises UserError if there is no chat template, or if the template fails or changes the text of the
        model's turns.
        """
        template, where = self._needed_template(), "an observation"
        asked, turn = {"role": "user", "content": "?"}, {"role": "assistant", "content": _STAND_IN}
        if calls and (
            text := self._after_calls([asked, {**turn, "tool_calls": list(calls)}], messages, tools)
        ):
            return self._ids(text)
        _, found, behind = template.render([asked, turn, *messages], where, tools).partition(_STAND_IN)
        if not found:
            raise UserError(
                "the chat template changes the model's turns, so nothing can be appended to them; set "
                "rollout.history=template"
            )
        return self._ids(behind)

    def _after_calls(
        self, called: list[dict[str, Any]], messages: list[dict[str, Any]], tools: Tools
    ) -> str | None:
        """Return the text that follows a turn with tool calls, or None if the template does not show it.

        called: a chat whose last message is a turn with tool calls.
        messages: messages that follow it.
        """
        template, where = self._needed_template(), "an observation"
        try:
            before = template.render(called, where, tools, generation=False)
            whole = template.render([*called, *messages], where, tools)
            end = template.split_from_end("", before, where).text
        except UserError:
            return None  # some templates show one call only
        name = called_function(called[-1]["tool_calls"][0])["name"]
        return whole[len(end) :] if whole.startswith(before) and name in end else None

    def continued(
        self,
        ids: list[int],
        messages: list[dict[str, Any]],
        tools: Tools = None,
        begun: int | None = None,
        calls: Sequence[dict[str, Any]] = (),
    ) -> list[int]:
        """Return the token ids of a chat, continued up to the beginning of the model's next turn.

        The result begins with exactly `ids`. What follows is written by the renderer, if there is one that
        continues turns as the chat template does, else by the chat template.

        ids: token ids of the chat so far, which ends with a turn of the model. If the model did not write the
            end of this turn, such as the end token, the end is added.
        messages: messages that follow this turn, such as an environment's answer. If there are none, the next
            turn follows at once.
        tools: JSON schemas of the tools that the model may call.
        begun: number of token ids before this turn. None: unknown, so the chat template is used.
        calls: tool calls of this turn, in the form that chat templates expect.

        Raises UserError if there is no chat template, or if it fails or changes the model's turns.
        """
        if begun is not None and messages and self.renderer and self.renderer.continues:
            offered = tools or self._template.tools
            if found := self.renderer.continued(ids[:begun], ids[begun:], messages, offered):
                return found
        behind, shape = self.after_turn(messages, tools, calls), self._needed_template().shape
        if not shape.is_closed:
            # The model may have ended its turn with the token that begins the next message.
            return [*ids, *(behind[1:] if behind[:1] == ids[-1:] else behind)]
        # The model usually wrote the end token of its turn itself. Then it is not added again. Text before
        # this token, such as a line break, may have become one token with the end of the turn's text.
        first = next((place for place, one in enumerate(behind) if one in self._added), None)
        if first is not None and ids[-1] in (behind[first], self._closing_id):
            behind = behind[first + 1 :]
        return [*ids, *behind]

    @cached_property
    def _closing_id(self) -> int:
        """Id of the token with which the model ends a turn. The template must have such a token."""
        return self._ids(self._needed_template().shape.closing)[-1]

    def prepare(self) -> None:
        """Find the format now, which may take some seconds, instead of when the first turn is read."""
        _ = self.renderer or self.detector

    @cached_property
    def renderer(self) -> TurnRenderer | None:
        """The renderer that reads the model's turns; None if no renderer agrees with the chat template."""
        if not self._trials:
            return None
        found = find_renderer(self._tokenizer, self._trials, self._template.arguments)
        if found:
            how = "read and continued" if found.continues else "read"
            logger.info(f"the model's turns are {how} by the renderer {found.name}")
        return found

    @cached_property
    def detector(self) -> CallDetector | None:
        """The detector of SGLang that reads the model's calls; None if they are in the format of Hermes.

        It is looked for only if there is no renderer.
        """
        if not self._trials or all(map(self._reads_as_hermes, self._trials)):
            return None
        found = find_detector(self._tokenizer, self._trials, self._decoder.ends)
        if found:
            logger.info(f"the model's tool calls are read by SGLang's detector {found.name}")
        else:
            logger.warning("the chat template's format of tool calls is not known, so calls stay in the text")
        return found

    @cached_property
    def _trials(self) -> list[Trial]:
        """Trials of the chat template; [] if it does not show tool calls."""
        tried = trials(self._template, self._ids) if self._template else []
        return tried if any(trial.calls for trial in tried) else []

    def _reads_as_hermes(self, trial: Trial) -> bool:
        ids = np.array(trial.turn_ids, dtype=np.int32)
        return trial.is_read_as(self._as_hermes(ids, trial.read_ids, trial.tools))

    def _as_hermes(self, ids: np.ndarray, read: Sequence[int], tools: Tools) -> WrittenTurn:
        return read_text(self._decoder(ids), self._before(read), [len(read), *ids.tolist()], bool(tools))

    def _before(self, read: Sequence[int]) -> str:
        return self._decoder.whole(list(read[-_LONGEST_TAG:]))

    def written_turn(self, ids: np.ndarray, read: Sequence[int], tools: Tools = None) -> WrittenTurn:
        """Separate a turn of the model into reasoning, text and tool calls.

        A turn whose calls cannot be read at all has none. They stay in its text.

        ids: int32 token ids of the turn.
        read: all token ids that the model read before it.
        tools: JSON schemas of the tools that the record offers to the model.
        """
        offered = tools or (self._template.tools if self._template else [])
        if self.renderer:
            try:
                return self.renderer.turn(ids.tolist(), read, offered)
            except Exception as error:  # the package raises many kinds, for what a model can write
                logger.debug("renderer %s: %s: %s", self.renderer.name, type(error).__name__, error)
                return self._as_hermes(ids, read, None)
        if offered and self.detector:
            return self.detector.turn(ids.tolist(), self._before(read), len(read), offered)
        return self._as_hermes(ids, read, offered)

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _needed_template(self) -> ChatTemplate:
        if self._template is None:
            raise UserError("a chat goes on by its template, but data.chat_template=none; set a template")
        return self._template
