"""Parser for what README.md and docs/ say and tests can check: commands, links, paths and configuration
keys.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Files whose comments give commands.
HEADS = [
    *(ROOT / name for name in ("Dockerfile", "apptainer.def")),
    *sorted((ROOT / "slurm").glob("*.sbatch")),
    *sorted((ROOT / "configs").glob("*.yaml")),
]
PROGRAM = """grpo-megatron|make|python3?|pip|pytest|ray|tensorboard|wandb|py-spy|nsys|nvidia-smi|docker\
|podman|apptainer|enroot|sbatch|srun|scancel|scontrol|squeue|sinfo|sacct|salloc|mkdir|cp|mv|rm|ls|cat|tail|grep|export|ssh|curl|git|kill|df|ps"""
SCRIPT = re.compile(r"(?:tools|benchmarks|slurm)/\w+\.py")
# Blocks of these languages hold commands and nothing else.
SHELLS = ("sh", "bash", "shell", "console")


@dataclass(frozen=True)
class Command:
    """A command that a page gives.

    place: file and line.
    text: the command in normalised form, on one line.
    output: what the page says that it prints, or None.
    section: text of the section that contains it.
    """

    place: str
    text: str
    output: str | None
    section: str


@dataclass(frozen=True)
class Part:
    """Consecutive lines of a page: a fenced block with its language, or a paragraph (language None)."""

    line: int
    language: str | None
    lines: tuple[str, ...]
    section: str


def parts(text: str) -> Iterator[Part]:
    sections = re.split(r"(?m)^(?=#+ )", _without_headings_in_blocks(text))
    line = 1
    for section in sections:
        yield from _parts_of(section, line)
        line += section.count("\n")


def _without_headings_in_blocks(text: str) -> str:
    """Put a space before comments in blocks, which would pass for headings. No comparison sees the space."""
    return re.sub(r"(?ms)^```.*?^```", lambda block: re.sub(r"(?m)^#", " #", block[0]), text)


def _parts_of(section: str, first: int) -> Iterator[Part]:
    language, begun, kept = None, first, []
    for number, line in enumerate(section.splitlines(), first):
        fence = line.lstrip().startswith("```")
        if fence or (language is None and not line.strip()):
            if kept:
                yield Part(begun, language, tuple(kept), section)
            kept = []
            if fence:
                language = line.strip().strip("`") if language is None else None
            continue
        begun = begun if kept else number
        kept.append(line)
    assert language is None, f"a block that begins before line {begun} does not end"
    if kept:
        yield Part(begun, None, tuple(kept), section)


def spans(part: Part) -> list[str]:
    """Return the code spans of a paragraph. A span may go over the end of a line."""
    if part.language is not None:
        return []
    return [
        found[1].strip() for found in re.findall(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", " ".join(part.lines))
    ]


def commands(path: Path) -> Iterator[Command]:
    name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".md":
        text = _head_as_page(text)
    for part in parts(text):
        for line, written, output in _written(part):
            for command in _normalised(written):
                yield Command(f"{name}:{line}", command, output, part.section)


def _head_as_page(text: str) -> str:
    """Turn comments into a page: indented commands become blocks, commands after a colon at a line's end
    become spans.
    """
    comments = (line[1:] if line.startswith("#") else "" for line in text.splitlines())
    return "\n".join(
        re.sub(rf"(?<=: )((?:{PROGRAM}) .+)$", r"`\1`", re.sub(r"^  +", "    ", line)) for line in comments
    )


def _written(part: Part) -> Iterator[tuple[int, str, str | None]]:
    """Yield (line, command as it is written, output or None)."""
    if part.language is None:
        yield from ((part.line, span, None) for span in spans(part))
        yield from ((part.line, line, None) for line in part.lines if line.startswith("    "))
    elif any(line.startswith("$ ") for line in part.lines):
        shown = re.split(r"(?m)^\$ ", "\n".join(part.lines) + "\n")
        for written, _, output in (one.partition("\n") for one in shown[1:]):
            yield part.line, written, output or None
    elif part.language in ("", "text", *SHELLS):
        # A line that ends in a backslash continues in the next one. So does a synopsis if the next line
        # begins with an option.
        joined = re.sub(r"\\\n|\n +(?=\[)", " ", "\n".join(part.lines))
        for written in joined.splitlines():
            if (
                part.language in SHELLS
                and written.strip()
                and not _normalised(written)
                and not written.strip().startswith("#")
            ):
                raise AssertionError(
                    f"line {part.line}: {written!r} is in a block of commands; its program is not in PROGRAM"
                )
            yield part.line, written, None


def _normalised(written: str) -> list[str]:
    """Return the commands of a line, without comments, the environment's folder, and a final ellipsis."""
    line = re.sub(r"(^|\s)#\s.*$", "", written)
    found = [
        re.sub(r"\s+", " ", one).strip().removeprefix(".venv/bin/").removesuffix(" ...")
        for one in line.split("&&")
    ]
    found = [re.sub(r"^([A-Z_]+=\S* )+", "", one) for one in found]
    found = [f"python {one}" if SCRIPT.match(one) else one for one in found]
    # A program of others alone is its name and no command.
    return [one for one in found if re.match(rf"(?:{PROGRAM}) ", one) or one == "grpo-megatron"]


def arguments(command: str, values: dict[str, str], optional: bool) -> list[str]:
    """Return the words of a command in which `values` replace the placeholders. A redirection is left out.

    optional: True to keep all of its [optional] parts, False to leave all of them out.
    """
    text = re.sub(r" > \S+$", "", command)
    text = re.sub(r"[\[\]]", "", text) if optional else re.sub(r"\s*\[[^\]]*\]", "", text)
    if values:
        names = "|".join(re.escape(name) for name in sorted(values, key=len, reverse=True))
        text = re.sub(rf"(?<![\w.])(?:{names})(?!\w)", lambda name: values[name[0]], text)
    return shlex.split(text)


def anchors(path: Path) -> set[str]:
    """Return the fragments of a page's headings, as GitHub makes them."""
    found: list[str] = []
    for heading in re.findall(
        r"(?m)^#+ (.+?)\s*$", _without_headings_in_blocks(path.read_text(encoding="utf-8"))
    ):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found.append(f"{slug}-{found.count(slug)}" if slug in found else slug)
    return set(found)


def links(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line of the paragraph, target) of every link and picture that is not on another site."""
    for part in parts(path.read_text(encoding="utf-8")):
        if part.language is None:
            prose = re.sub(r"(`+).+?\1", "", " ".join(part.lines))
            for target in re.findall(r"\]\(<?([^)\s>]+)", prose):
                if not re.match(r"[a-z]+:", target):
                    yield part.line, target


def blocks(path: Path) -> list[str]:
    """Return the fenced blocks of a page."""
    return [
        "\n".join(part.lines) + "\n"
        for part in parts(path.read_text(encoding="utf-8"))
        if part.language is not None
    ]
