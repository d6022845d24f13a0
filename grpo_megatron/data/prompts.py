"""Prompts made from records: text, tokens and reference answer. Long prompts are refused, skipped or cut."""

import math
import re
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.config.data import DataConfig, OverlongPrompts
from grpo_megatron.data.lazy import LazySequence
from grpo_megatron.data.messages import offered_tools
from grpo_megatron.data.records import open_records
from grpo_megatron.data.store import Records
from grpo_megatron.data.tokenizer import PromptTokenizer, Tools
from grpo_megatron.data.values import lookup, required, shown
from grpo_megatron.errors import UserError

# Called with a prompt and the place of its record. Raises UserError if the prompt cannot be used.
RecordCheck = Callable[[Prompt, str], None]


def as_list(value: Any) -> list[str]:
    """Return data.train or data.eval as a list of sources.

    value: one source, a list of sources, or None.
    """
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def reference_answer(value: Any, where: str) -> str | list[str]:
    """Return a record's reference answer as text, or as a list of texts if several answers are accepted.

    Numbers are written in digits without an exponent (1e-07 -> 0.0000001), and whole numbers without a
    decimal point (15.0 -> 15). True and False are written as in Python.

    value: value of the record's field: one answer, or a list of accepted answers.
    where: place of the record and its field, for error messages.

    Raises UserError if an answer is not a string, a finite number or a bool, or if the list is empty.
    """
    if isinstance(value, list):
        if not value:
            raise UserError(f"{where} is an empty list; it must contain at least one accepted answer")
        return [_answer_text(item, f"{where}, item {index}") for index, item in enumerate(value)]
    return _answer_text(value, where)


def _answer_text(value: Any, where: str) -> str:
    """Return one reference answer as text.

    where: place of the answer, for error messages.

    Raises UserError if the value is not a string, a finite number or a bool.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise UserError(f"{where} is {value}; a reference answer must be finite")
        return format(Decimal(repr(value)), "f").removesuffix(".0")
    if isinstance(value, int):
        return str(value)
    raise UserError(
        f"{where} is {shown(value)}; a reference answer must be a string, a number, true or false, or a "
        "list of accepted answers of these types; to use a field inside an object, set "
        "data.answer_key=outer.inner"
    )


@dataclass(frozen=True)
class PromptMaker:
    """Maker of prompts. Called with a record's index, it returns the record's prompt."""

    records: Records
    """The records of one source."""
    tokenizer: PromptTokenizer
    """Tokenizer for the prompts."""
    config: DataConfig
    """The section `data` of the configuration."""
    first_uid: int
    """Unique id (uid) of the prompt of record 0. The prompt of record i has the uid `first_uid` + i."""
    name: str
    """Name of the data source. Each prompt gets it as `Prompt.source`."""

    def __call__(self, index: int) -> Prompt:
        """Return the prompt of the record with this index, cut on the left if it is too long.

        Its token ids are the last data.max_prompt_length ones of the whole prompt. Its text is not cut.

        Raises UserError, naming the record, if the record is damaged or invalid.
        """
        prompt = self.whole(index)
        return replace(prompt, ids=prompt.ids[-self.config.max_prompt_length :])

    def whole(self, index: int) -> Prompt:
        """Return the prompt of the record with this index, without cutting it if it is too long.

        Raises UserError, naming the record, if the record is damaged or invalid.
        """
        config, where = self.config, self.records.where(index)
        record = self.records[index]
        given = record_prompt(self.records, record, config, where)
        tools = record_tools(self.records, record, config, where)
        text, ids = self.tokenizer.prompt(given, where, tools)
        answer = reference_answer(
            required(record, config.answer_key, where), f"{where}: field {config.answer_key!r}"
        )
        fields = {
            key: value for key, value in record.items() if key not in (config.prompt_key, config.answer_key)
        }
        messages = self.tokenizer.messages(given, where)
        return Prompt(self.first_uid + index, ids, text, answer, fields, self.name, messages, tools)


def record_prompt(records: Records, record: dict[str, Any], config: DataConfig, where: str) -> Any:
    """Return the value of a record's prompt field: a text, a list of chat messages, or a list of token ids.

    records: the data source that the record is from.
    config: section `data` of the configuration, with the field's name in `prompt_key`.
    where: place of the record, for error messages.

    Raises UserError if the field is missing or null.
    """
    return records.meant(required(record, config.prompt_key, where))


def record_tools(records: Records, record: dict[str, Any], config: DataConfig, where: str) -> Tools:
    """Return the JSON schemas of the tools that a record offers to the model, or None if it offers none.

    records: the data source that the record is from.
    config: section `data` of the configuration, with the field's name in `tools_key`. If it is null, no
        record offers tools.
    where: place of the record, for error messages.

    Raises UserError if the field contains anything other than schemas, null or an empty value.
    """
    given = None if config.tools_key is None else lookup(record, config.tools_key)
    if given in (None, [], ""):
        return None
    return offered_tools(records.meant(given), f"{where}: field {config.tools_key!r}") or None


def load_prompts(
    source: str,
    tokenizer: PromptTokenizer,
    config: DataConfig,
    first_uid: int = 0,
    check: RecordCheck | None = None,
) -> tuple[Sequence[Prompt], dict[str, int]]:
    """Load the prompts of one data source. Return (prompts, counts).

    - prompts: a sequence that reads and tokenizes a prompt each time it is requested. Only the indices of the
      records are kept in memory.
    - counts: {"skipped": number of prompts left out, "truncated": number of prompts that are cut}. Prompts
      with more than data.max_prompt_length tokens are left out or cut, as data.overlong_prompts says.

    Every record is read, checked and tokenized once here, so that errors in the data are found before the run
    starts.

    config: section `data` of the configuration.
    first_uid: unique id (uid) of the first record's prompt. The uids of the following records count up from
        it.
    check: function (prompt, place of its record) that raises UserError if the prompt cannot be used, for
        example because the reward cannot score it.

    Raises UserError, naming the record, if a record is invalid, or if its prompt is too long and
    data.overlong_prompts=error. Raises UserError also if no prompt is left.
    """
    records = open_records(source)
    name = re.sub(r"[^\w.-]+", "_", Path(source).stem)  # the name becomes part of file names and metric tags
    make = PromptMaker(records, tokenizer, config, first_uid, name)
    kept, counts = array("q"), {"skipped": 0, "truncated": 0}
    for index in range(len(records)):
        prompt = make.whole(index)
        length = len(prompt.ids)
        if length > config.max_prompt_length:
            if config.overlong_prompts == OverlongPrompts.error:
                raise UserError(
                    f"{records.where(index)}: the prompt has {length} tokens, more than "
                    f"data.max_prompt_length={config.max_prompt_length}; raise the limit, or set "
                    "data.overlong_prompts=skip or data.overlong_prompts=truncate_left"
                )
            if config.overlong_prompts == OverlongPrompts.skip:
                counts["skipped"] += 1
                continue
            counts["truncated"] += 1
        if check:
            check(prompt, records.where(index))
        kept.append(index)
    if not kept:
        raise UserError(
            f"{source}: no prompts are left because all {counts['skipped']} are longer than "
            f"data.max_prompt_length={config.max_prompt_length}; raise it"
        )
    return LazySequence(kept, make, {source: records.digest()}), counts
