"""Preference pairs, the training data of a reward model: a chosen and a rejected response to a prompt."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo_megatron.batch.examples import Example
from grpo_megatron.batch.pairs import Pair
from grpo_megatron.config.data import DataConfig, OverlongPrompts
from grpo_megatron.data.conversations import Conversations
from grpo_megatron.data.lazy import ConcatSequence, LazySequence
from grpo_megatron.data.lengths import too_long, within_limit
from grpo_megatron.data.messages import chat_in_text, chat_messages, written_beside_content
from grpo_megatron.data.prompts import as_list, record_prompt, record_tools
from grpo_megatron.data.records import open_records
from grpo_megatron.data.store import Records
from grpo_megatron.data.values import required, shown
from grpo_megatron.errors import UserError


@dataclass(frozen=True)
class PairMaker:
    """Maker of preference pairs. Called with a record's index, it returns the record's pair."""

    records: Records
    """The records of one source."""
    conversations: Conversations
    """Tokenizer of the reward model, and the rules by which it reads a finished conversation."""
    config: DataConfig
    """The section `data` of the configuration."""
    longest: int
    """Maximum length of a response in tokens."""

    def __call__(self, index: int) -> Pair:
        """Return the preference pair of the record with this index: chosen and rejected response, and margin.

        With data.overlong_prompts=truncate_left, a long prompt is cut on the left.

        Raises UserError, naming the record, if the record is damaged or invalid.
        """
        record, where = self.records[index], self.records.where(index)
        margin = 0.0 if self.config.margin_key is None else _margin(record, self.config.margin_key, where)
        chosen, rejected = (
            self._example(record, key, where) for key in (self.config.chosen_key, self.config.rejected_key)
        )
        return Pair(chosen, rejected, margin)

    def _example(self, record: dict[str, Any], key: str, where: str) -> Example:
        """Return token ids of a record's prompt with its chosen or its rejected response, as an Example.

        key: field of the record that contains the response: data.chosen_key or data.rejected_key.
        where: place of the record, for error messages.

        Raises UserError if the record is invalid or the response has no tokens.
        """
        tokenizer = self.conversations.tokenizer
        prompt_ids, said = self._prompt_and_response(record, key, where)
        response = self.conversations.finished(tokenizer.encode(said))
        if not (said and len(tokenizer.encode(said)) and len(response)):
            raise UserError(
                f"{where}: the response in field {key!r} has no tokens: {shown(said)}; correct or remove the "
                "record"
            )
        return Example(within_limit(prompt_ids, self.config), response)

    def _prompt_and_response(self, record: dict[str, Any], key: str, where: str) -> tuple[np.ndarray, str]:
        """Return (prompt_ids, response): int32 token ids of the prompt, and the response as text.

        key: field of the record that contains the response, either as text, or as a chat whose last message
            is the response.
        where: place of the record, for error messages.

        Raises UserError if the record is invalid.
        """
        tokenizer, value = self.conversations.tokenizer, self.records.meant(required(record, key, where))
        tools = record_tools(self.records, record, self.config, where)
        if isinstance(value, str):
            value = chat_in_text(value, where) or value
        if isinstance(value, str):
            return tokenizer.prompt(record_prompt(self.records, record, self.config, where), where, tools)[
                1
            ], value
        messages = chat_messages(value, f"{where}: field {key!r}")
        if messages[-1]["role"] != "assistant":
            raise UserError(
                f"{where}: the last message in field {key!r} must have the role 'assistant', not "
                f"{shown(messages[-1]['role'])}"
            )
        *earlier, last = self._conversation(messages, record, where)
        _, prompt_ids = tokenizer.chat_prompt(earlier, where, tools)
        if not written_beside_content(last):
            return prompt_ids, last["content"]
        return prompt_ids, tokenizer.template.turn([*earlier, last], where, tools).text

    def _conversation(
        self, messages: list[dict[str, Any]], record: dict[str, Any], where: str
    ) -> list[dict[str, Any]]:
        """Return all messages of a conversation, from the prompt to the response.

        The system prompt and the suffix of the configuration are added to the prompt.

        messages: the chat in the field with the response. If it begins with an assistant message, it
            continues the record's prompt. Otherwise, it is already the whole conversation.
        where: place of the record, for error messages.

        Raises UserError if `messages` continues a prompt that is not a chat.
        """
        tokenizer = self.conversations.tokenizer
        if messages[0]["role"] != "assistant":
            return [*tokenizer.messages(messages[:-1], where), messages[-1]]
        asked = tokenizer.messages(record_prompt(self.records, record, self.config, where), where)
        if asked is None:
            raise UserError(
                f"{where}: the prompt is not a chat, so the responses must be strings, not messages"
            )
        return [*asked, *messages]

    def problem(self, pair: Pair) -> str | None:
        """Return why a pair is too long, or None if it is within the limits.

        The longer of the two prompts and the longer of the two responses count. The returned text continues a
        message that begins with the place of the record, such as "has 9 prompt and 3 response tokens, more
        than ...".
        """
        both = (pair.chosen, pair.rejected)
        prompt = max(len(one.prompt_ids) for one in both)
        response = max(len(one.response_ids) for one in both)
        return too_long(prompt, response, self.config, self.longest)


def _are_alike(one: Example, other: Example) -> bool:
    """Return True if the examples have the same prompt and the same response."""
    return np.array_equal(one.prompt_ids, other.prompt_ids) and np.array_equal(
        one.response_ids, other.response_ids
    )


def _margin(record: dict[str, Any], key: str, where: str) -> float:
    value = required(record, key, where)
    if type(value) not in (int, float) or not 0 <= value < np.inf:
        raise UserError(
            f"{where}: field {key!r} must be a finite number of at least 0, but is {shown(value)}"
        )
    return float(value)


def load_pairs(
    sources: Any, conversations: Conversations, data: DataConfig, longest: int
) -> tuple[Sequence[Pair], dict[str, int]]:
    """Load the preference pairs of one or several data sources. Return (pairs, counts).

    - pairs: a sequence that makes a pair each time it is requested. Only the indices of the records are kept
      in memory.
    - counts: {reason: number of pairs left out}. The reasons are "too long" (only with
      data.overlong_prompts=skip) and "with two identical responses".

    Every record is read, checked and tokenized once here, so that errors in the data are found before the run
    starts.

    sources: data.train or data.eval, one source or a list.
    conversations: tokenizer and rules of the reward model.
    data: section `data` of the configuration.
    longest: maximum length of a response in tokens. A response is never cut.

    Raises UserError, naming the record, if a record is invalid, or if a pair is too long and
    data.overlong_prompts is not skip. Raises UserError also if a source has no pair left.
    """
    parts, counts = [], {"too long": 0, "with two identical responses": 0}
    for source in as_list(sources):
        records = open_records(source)
        make = PairMaker(records, conversations, data, longest)
        kept = array("q")
        for index in range(len(records)):
            pair = make(index)
            if problem := make.problem(pair):
                if data.overlong_prompts != OverlongPrompts.skip:
                    raise UserError(
                        f"{records.where(index)} {problem}; raise the limit, or set "
                        "data.overlong_prompts=skip"
                    )
                counts["too long"] += 1
            elif _are_alike(pair.chosen, pair.rejected):
                counts["with two identical responses"] += 1
            else:
                kept.append(index)
        if not kept:
            raise UserError(
                f"{source}: no pairs are left because all {len(records)} are too long or have two identical "
                "responses; raise data.max_prompt_length or rollout.max_response_length, or use other data"
            )
        parts.append(LazySequence(kept, make, {source: records.digest()}))
    return ConcatSequence(parts), counts
