"""Random damage to a configuration, drawn from a seed: to the YAML text, and to the arguments beside it."""

import random
import string
from collections.abc import Callable
from dataclasses import dataclass

from grpo_megatron.config.load import known_keys

VALUES = [
    *(
        "",
        "null",
        "~",
        "true",
        "off",
        "-1",
        "0",
        "1.5",
        "1e400",
        ".nan",
        "-.inf",
        "9" * 25,
        "0x_",
        "007",
        "1:30",
    ),
    *(
        "2024-13-45",
        "[",
        "]",
        "{a",
        "[1, [2, [3]]]",
        "{a: {b: c}}",
        "[" * 200,
        "'",
        '"',
        '"\\0"',
        '"\\ud800"',
        "!!int x",
        "!x y",
    ),
    *(
        "*nowhere",
        "<<",
        "=",
        "???",
        "${",
        "${}",
        "${rollout.n",
        "${rollout.m}",
        "${no:1}",
        "${oc.env:NO_SUCH}",
    ),
    *(
        "${rollout}",
        "${data.train}",
        "x" * 3000,
        "nothing:here",
        ":",
        "..:x",
        "/dev/zero",
        "/tmp",
        "@",
        "%x",
        "- 1",
    ),
    *("\t1", "a: b", "\N{ARABIC-INDIC DIGIT FOUR}", "\N{NO-BREAK SPACE}", "#", "|", "---\n1"),
]
BYTES = [
    b"\x00",
    b"\xff",
    b"\t",
    b":",
    b"{",
    b"]",
    b"'",
    b"\n",
    b"&a ",
    b"*a",
    b"!",
    b"${",
    b"\xed\xa0\x80",
    b"\xef\xbb\xbf",
    b"\x85",
]


@dataclass
class Corruption:
    """A damaged configuration.

    how: name of the mutation.
    text: text of the file.
    arguments: key=value arguments beside the file.
    """

    how: str
    text: bytes
    arguments: list[str]


def corrupt(text: str, seed: int) -> Corruption:
    rng = random.Random(seed)
    mutation = rng.choice(list(_OF_TEXT) + list(_OF_ARGUMENTS))
    if mutation in _OF_ARGUMENTS:
        return Corruption(mutation, text.encode(), [_OF_ARGUMENTS[mutation](rng)])
    changed = _OF_TEXT[mutation](text.splitlines(), rng)
    return Corruption(
        mutation, changed if isinstance(changed, bytes) else ("\n".join(changed) + "\n").encode(), []
    )


def _set_line(lines: list[str], number: int, *new: str) -> list[str]:
    return [*lines[:number], *new, *lines[number + 1 :]]


def _line_with_value(lines: list[str], rng: random.Random) -> int:
    return rng.choice([n for n, line in enumerate(lines) if ": " in line])


def _section_line(lines: list[str], rng: random.Random) -> int:
    return rng.choice([n for n, line in enumerate(lines) if line.endswith(":")])


def _another_value(lines: list[str], rng: random.Random) -> list[str]:
    number = _line_with_value(lines, rng)
    return _set_line(lines, number, f"{lines[number].split(': ')[0]}: {rng.choice(VALUES)}")


def _misspelt(name: str, rng: random.Random) -> str:
    at = rng.randrange(len(name))
    return rng.choice(
        [
            name[:at] + name[at + 1 :],
            name[:at] + name[at] + name[at:],
            name[:at] + rng.choice(string.printable) + name[at + 1 :],
        ]
    )


def _misspelt_key(lines: list[str], rng: random.Random) -> list[str]:
    number = rng.choice([n for n, line in enumerate(lines) if ":" in line])
    key, _, value = lines[number].partition(":")
    indent = key[: len(key) - len(key.lstrip())]
    return _set_line(lines, number, f"{indent}{_misspelt(key.strip(), rng)}:{value}")


def _moved_in_or_out(lines: list[str], rng: random.Random) -> list[str]:
    number = rng.randrange(len(lines))
    line = rng.choice(
        [f" {lines[number]}", f"    {lines[number]}", f"\t{lines[number]}", lines[number].lstrip()]
    )
    return _set_line(lines, number, line)


def _nested_value(lines: list[str], rng: random.Random) -> list[str]:
    number = _line_with_value(lines, rng)
    key, _, value = lines[number].partition(": ")
    return _set_line(lines, number, f"{key}:", f"{' ' * (len(key) - len(key.lstrip()) + 4)}value: {value}")


def _swapped(lines: list[str], rng: random.Random) -> list[str]:
    a, b = rng.sample(range(len(lines)), 2)
    return _set_line(_set_line(lines, a, lines[b]), b, lines[a])


def _other_bytes(lines: list[str], rng: random.Random) -> bytes:
    raw = "\n".join(lines).encode()
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(raw))
        raw = raw[:at] + rng.choice(BYTES) + raw[at + rng.randint(0, 2) :]
    return raw


_OF_TEXT: dict[str, Callable[[list[str], random.Random], list[str] | bytes]] = {
    "a line deleted": lambda lines, rng: _set_line(lines, rng.randrange(len(lines))),
    "a section's name deleted": lambda lines, rng: _set_line(lines, _section_line(lines, rng)),
    "a line twice": lambda lines, rng: _set_line(lines, n := rng.randrange(len(lines)), lines[n], lines[n]),
    "two lines swapped": _swapped,
    "cut off": lambda lines, rng: "\n".join(lines)[: rng.randrange(len(lines) * 10)].encode(),
    "other bytes": _other_bytes,
    "another value": _another_value,
    "another value, once more": _another_value,
    "a key misspelt": _misspelt_key,
    "indented otherwise": _moved_in_or_out,
    "nested where a scalar belongs": _nested_value,
    "a scalar where a section belongs": lambda lines, rng: _set_line(
        lines, n := _section_line(lines, rng), f"{lines[n]} {rng.choice(VALUES)}"
    ),
    "an unknown section": lambda lines, rng: [*lines, f"{_misspelt('rollout', rng)}x: {{n: 1}}"],
    "a key from nowhere": lambda lines, rng: _set_line(
        lines, n := rng.randrange(len(lines)), lines[n], rng.choice(VALUES)
    ),
}


def _any_key(rng: random.Random) -> str:
    return rng.choice(list(known_keys()))


def _noise(rng: random.Random) -> str:
    return "".join(rng.choice(string.printable) for _ in range(rng.randint(0, 30)))


_OF_ARGUMENTS: dict[str, Callable[[random.Random], str]] = {
    "an argument's value": lambda rng: f"{_any_key(rng)}={rng.choice(VALUES)}",
    "an argument's key": lambda rng: f"{_misspelt(_any_key(rng), rng)}=1",
    "no argument": lambda rng: rng.choice(
        [_any_key(rng), f"={rng.choice(VALUES)}", "." * rng.randint(1, 50) + "=1"]
    ),
    "an argument of noise": lambda rng: f"{rng.choice([_any_key(rng), _noise(rng)])}={_noise(rng)}",
}
