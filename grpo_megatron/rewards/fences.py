"""Extraction of the program from a response: the whole text, or a block between Markdown fences."""

import re
import textwrap
from dataclasses import dataclass

from grpo_megatron.config.sandbox import CodePlace

_FENCE = re.compile(r"`{3,}|~{3,}")
# Text after an opening fence: a language, also written {.python}, and attributes. All quantifiers are
# possessive, so that a long line is read only once.
_INFO = re.compile(r"[ \t]*+\{?\.?(?P<language>[\w+#.-]*+)(?P<attributes>[^\n`~]*+)\n")
# Text allowed after a closing fence on its line: nothing, or tags such as </answer>.
_REST = re.compile(r"[ \t\r]*+(?:</?\w++>[ \t\r]*+)*+(?:\n|\Z)")
_WORD_NEXT = re.compile(r"[ \t]*+\w")
_PYTHON = re.compile(r"(?:python|py)[\d.]*", re.IGNORECASE)


@dataclass(frozen=True)
class _Block:
    language: str  # as written after the opening fence; may be empty
    start: int  # position of the block's contents in the text
    end: int  # exclusive


def find_program(response: str, place: CodePlace) -> str | None:
    """Return the text of the program in a response, or None if there is none.

    A program from a code block is returned without the block's common indentation.

    place: where the program is: the whole response, or its first or last code block between ``` or ~~~
        fences. Only closed blocks count. If a block names the language Python, blocks without a language are
        ignored, because they may show what a program prints. Blocks in other languages are always ignored.
    """
    if place == CodePlace.whole:
        return response if response.strip() else None
    blocks = _blocks(response)
    programs = [block for block in blocks if _PYTHON.fullmatch(block.language)]
    programs = programs or [block for block in blocks if not block.language]
    if not programs:
        return None
    program = programs[0 if place == CodePlace.first_block else -1]
    return textwrap.dedent(response[program.start : program.end])


def _blocks(text: str) -> list[_Block]:
    """Return the closed Markdown code blocks of a text in order.

    The search takes time linear in the length of the text. Models do not write strict Markdown, so other text
    may share a line with a fence. Words or a tag such as `<answer>` may come before an opening fence. Code
    may come before a closing fence, and a tag after it. Fences whose line could be part of the program are
    not accepted.
    """
    blocks: list[_Block] = []
    language, start, opening = "", 0, ""  # `opening`: the fence of the current block, or empty
    is_inline, previous_end = False, 0
    for fence in _FENCE.finditer(text):
        _, newline, line = text[previous_end : fence.start()].rpartition("\n")
        begins_line = not line.strip() and bool(newline or not previous_end)
        previous_end = fence.end()
        if opening:
            if fence[0].startswith(opening) and _closes(text, fence.end(), begins_line):
                blocks.append(_Block(language, start, fence.start()))
                opening = ""
        elif is_inline and not newline:
            is_inline = False  # end of `code` between fences on one line
        else:
            info = _INFO.match(text, fence.end())
            is_inline = info is None
            if info and (begins_line or not info["attributes"].strip()):
                language, start, opening = info["language"], info.end(), fence[0]
    return blocks


def _closes(text: str, fence_end: int, begins_line: bool) -> bool:
    """Return True if a fence closes the current code block.

    It does if nothing but tags follows on its line. It also does if the fence begins its line and no word
    follows.

    fence_end: position in `text` after the fence.
    begins_line: True if only white space stands before the fence on its line.
    """
    return bool(_REST.match(text, fence_end)) or (begins_line and not _WORD_NEXT.match(text, fence_end))
