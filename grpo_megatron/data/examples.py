"""Prompt/response pairs for supervised training."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from grpo_megatron.batch.examples import Example
from grpo_megatron.config.data import OverlongPrompts
from grpo_megatron.config.schema import Config
from grpo_megatron.data.lazy import ConcatSequence, LazySequence
from grpo_megatron.data.lengths import too_long, within_limit
from grpo_megatron.data.prompts import as_list, record_prompt, record_tools
from grpo_megatron.data.records import open_records
from grpo_megatron.data.store import Records
from grpo_megatron.data.tokenizer import PromptTokenizer
from grpo_megatron.data.turns import Asked, written
from grpo_megatron.data.values import required
from grpo_megatron.errors import UserError


def load_examples(config: Config, tokenizer: PromptTokenizer) -> tuple[Sequence[Example], int]:
    """Load the examples of data.train, which are prompt/response pairs, for supervised training.

    Returns (examples, left_out):

    - examples: a sequence that makes an example each time it is requested. Every example is made once here,
      so that errors in the data are found before the run starts, but none is kept in memory.
    - left_out: number of pairs that are left out because they are too long. Pairs are only left out with
      data.overlong_prompts=skip.

    A response is a text, or a list of messages that begins and ends with an assistant message, such as an
    episode with an environment. All assistant messages of such a list are trained on. Every response ends
    with the token by which the chat template ends an assistant turn, or with the tokenizer's end token if the
    template has no such token.

    Raises UserError, naming the record, if a record is invalid, or if a pair is too long and
    data.overlong_prompts is not skip. Raises UserError also if a source has no pair left.
    """
    parts, left_out = [], 0
    for source in as_list(config.data.train):
        records = open_records(source)
        make = ExampleMaker(records, tokenizer, config)
        kept = array("q", (index for index in range(len(records)) if make.fits(index)))
        if not kept:
            raise UserError(
                f"{source}: no examples are left because all {len(records)} are too long; raise "
                "data.max_prompt_length or rollout.max_response_length"
            )
        parts.append(LazySequence(kept, make, {source: records.digest()}))
        left_out += len(records) - len(kept)
    return ConcatSequence(parts), left_out


@dataclass(frozen=True)
class ExampleMaker:
    """Maker of supervised examples. It is called with a record's index.

    It returns the token ids of the record's prompt and response.
    """

    records: Records
    tokenizer: PromptTokenizer
    config: Config

    def __call__(self, index: int) -> Example:
        """Return the supervised example (token ids of prompt and response) of the record with this index.

        With data.overlong_prompts=truncate_left, a long prompt is cut on the left.

        Raises UserError, naming the record, if the record is damaged or invalid.
        """
        data = self.config.data
        record, where = self.records[index], self.records.where(index)
        given, tools = (
            record_prompt(self.records, record, data, where),
            record_tools(self.records, record, data, where),
        )
        text, prompt = self.tokenizer.prompt(given, where, tools)
        asked = Asked(text, self.tokenizer.messages(given, where), tools)
        answer = self.records.meant(required(record, data.response_key, where))
        response, mask = written(self.tokenizer, asked, answer, f"{where}: field {data.response_key!r}")
        return Example(within_limit(prompt, data), response, mask)

    def fits(self, index: int) -> bool:
        """Return True if the example of the record with this index is within the length limits.

        Raises UserError if the example is too long and data.overlong_prompts is not skip. The example is made
        for this check, so an invalid record raises UserError too.
        """
        example, data = self(index), self.config.data
        lengths = (len(example.prompt_ids), len(example.response_ids))
        problem = too_long(*lengths, data, self.config.rollout.max_response_length)
        if problem and data.overlong_prompts != OverlongPrompts.skip:
            raise UserError(
                f"{self.records.where(index)} {problem}; raise the limit, or set data.overlong_prompts=skip"
            )
        return problem is None
