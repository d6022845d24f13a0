"""CallDetector: reads tool calls with a detector of SGLang, for formats that no renderer reads."""

import json
import logging
from collections.abc import Sequence
from typing import Any

from grpo_megatron.batch.written_turn import WrittenCall, WrittenTurn, call_ids, read_text
from grpo_megatron.data.renderer_trials import Trial

logger = logging.getLogger(__name__)


class CallDetector:
    """Reads turns: their tool calls with a detector of SGLang, and their reasoning between <think> tags.

    name: name of the detector in SGLang (--tool-call-parser)
    """

    def __init__(self, name: str, tokenizer: Any, ends: frozenset[int]):
        """Create a reader that is not proven to read anything yet.

        tokenizer: the model's tokenizer, an object of transformers.
        ends: ids of the tokens that end or pad a turn.
        """
        self.name, self._tokenizer, self._ends = name, tokenizer, ends

    def turn(self, ids: Sequence[int], before: str, num_read: int, tools: list[dict]) -> WrittenTurn:
        """Separate a turn of the model into its parts. A turn whose calls are malformed has none.

        ids: token ids of the turn.
        before: end of the text that the model read before it.
        num_read: number of token ids that the model read before it.
        tools: JSON schemas of the tools that were offered to the model.
        """
        text = self._tokenizer.decode([one for one in ids if one not in self._ends])
        turn = read_text(text, before, ids, has_tools=False)
        if turn.is_cut or not tools:
            return turn
        try:
            content, found = self._detected(turn.text, tools)
            arguments = [json.loads(call.parameters or "{}") for call in found]
        except Exception as error:  # detectors raise many kinds, for calls that are malformed
            logger.debug("detector %s: %s: %s", self.name, type(error).__name__, error)
            return turn
        if not found:
            return turn
        names = call_ids([num_read, *ids], len(found))
        calls = zip(found, arguments, names, strict=True)
        written = tuple(WrittenCall(call.name, given, id) for call, given, id in calls)
        return WrittenTurn(turn.text, content.strip(), turn.reasoning, written)

    def _detected(self, text: str, tools: list[dict]) -> tuple[str, list[Any]]:
        """Return (text without calls, calls) as SGLang finds them."""
        from sglang.srt.entrypoints.openai.protocol import Tool
        from sglang.srt.environ import envs
        from sglang.srt.function_call.function_call_parser import FunctionCallParser

        offered = [Tool.model_validate(tool) for tool in tools]
        # A call of an unknown tool must be answered, so it must not be left out.
        with envs.SGLANG_FORWARD_UNKNOWN_TOOLS.override(True):
            return FunctionCallParser(offered, self.name).parse_non_stream(text)

    def reads(self, trial: Trial) -> bool:
        """Return True if the detector reads the turn of a trial as it was given to the chat template."""
        before = self._tokenizer.decode(trial.read_ids[-16:])
        return trial.is_read_as(self.turn(trial.turn_ids, before, len(trial.read_ids), trial.tools))


def find_detector(tokenizer: Any, tried: list[Trial], ends: frozenset[int]) -> CallDetector | None:
    """Return the first detector that reads each trial turn as the chat template wrote it, or None.

    tried: the trials.
    ends: ids of the tokens that end or pad a turn.
    """
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    names = FunctionCallParser.ToolCallParserEnum
    noisy = logging.getLogger("sglang")  # detectors log each call that they cannot read
    before = noisy.level
    noisy.setLevel(logging.CRITICAL)
    try:
        found = (CallDetector(name, tokenizer, ends) for name in names)
        return next((one for one in found if all(map(one.reads, tried))), None)
    finally:
        noisy.setLevel(before)
