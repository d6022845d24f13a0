"""Make one-step word problems, the task of `make quickstart-real`.

    python tools/make_word_problems.py OUT_DIR [--seed S] [--train N] [--held-out N]

Writes OUT_DIR/train.jsonl and OUT_DIR/eval.jsonl with one {"prompt": ..., "answer": ...} per line. A prompt
is, for example:

    Anna has 11 books. Omar has 20 books. How many books do they have together?

Additions, subtractions and multiplications are a third of the problems each. The two files share the
wordings, but no person, no object and, within a kind of problem, no pair of numbers (in either order).
"""

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from grpo_megatron.files import json_text

NAMES = [
    "Anna",
    "Omar",
    "Ben",
    "Clara",
    "David",
    "Elena",
    "Felix",
    "Grace",
    "Hugo",
    "Iris",
    "Jack",
    "Karen",
    "Leo",
    "Maria",
    "Noah",
    "Olga",
    "Paul",
    "Rosa",
    "Sam",
    "Tina",
]
HELD_OUT_NAMES = ["Adam", "Bella", "Carlos", "Diana", "Ethan", "Fatima", "George", "Hannah"]
OBJECTS = [
    "books",
    "apples",
    "pens",
    "stamps",
    "cards",
    "marbles",
    "coins",
    "shells",
    "stickers",
    "cookies",
    "balls",
    "eggs",
]
HELD_OUT_OBJECTS = ["pencils", "oranges", "keys", "buttons", "toys", "flowers"]
HELD_OUT_SHARE = 0.25
"""Share of the pairs of numbers that only eval.jsonl uses."""


@dataclass(frozen=True)
class Kind:
    """A kind of problem: one operation, and the wordings that ask for it.

    smallest, largest: range of both numbers, ends included.
    answer: function that computes the answer from both numbers.
    wordings: templates with {x} and {y} for numbers, {a} and {b} for persons, {o} for objects.
    """

    smallest: int
    largest: int
    answer: Callable[[int, int], int]
    wordings: tuple[str, ...]


KINDS = (
    Kind(
        2,
        20,
        lambda x, y: x + y,
        (
            "{a} has {x} {o}. {b} has {y} {o}. How many {o} do they have together?",
            "There are {x} {o} on the table. {a} brings {y} more {o}. How many {o} are there now?",
        ),
    ),
    Kind(
        2,
        20,
        lambda x, y: x - y,
        (
            "{a} has {x} {o} and gives {y} of them to {b}. How many {o} does {a} have left?",
            "There were {x} {o} in the shop. {a} bought {y} of them. How many {o} are left in the shop?",
        ),
    ),
    Kind(
        2,
        10,
        lambda x, y: x * y,
        (
            "{a} has {x} boxes with {y} {o} in each box. How many {o} does {a} have?",
            "{x} friends bring {y} {o} each. How many {o} do they bring in all?",
        ),
    ),
)


def pairs_of(kind: Kind, rng: random.Random) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Divide all pairs of different numbers of a kind of problem. Return (training pairs, held-out pairs).

    The larger number comes first in each pair. The lists are in random order and have no pair in common.
    """
    numbers = range(kind.smallest, kind.largest + 1)
    pairs = [(x, y) for x in numbers for y in numbers if x > y]
    rng.shuffle(pairs)
    held_out = round(len(pairs) * HELD_OUT_SHARE)
    return pairs[held_out:], pairs[:held_out]


def problem(
    kind: Kind, pair: tuple[int, int], names: list[str], objects: list[str], rng: random.Random
) -> dict[str, str]:
    x, y = pair
    if kind.answer(x, y) == kind.answer(y, x) and rng.random() < 0.5:
        x, y = y, x
    a, b = rng.sample(names, 2)
    text = rng.choice(kind.wordings).format(x=x, y=y, a=a, b=b, o=rng.choice(objects))
    return {"prompt": text, "answer": str(kind.answer(x, y))}


def make(out: Path, seed: int, train: int, held_out: int) -> dict[str, int]:
    """Write train.jsonl and eval.jsonl. Return {"train": number of problems, "eval": number of problems}.

    No problem occurs twice.

    train, held_out: number of problems in train.jsonl and in eval.jsonl.
    """
    rng = random.Random(seed)
    divided = [pairs_of(kind, rng) for kind in KINDS]
    out.mkdir(parents=True, exist_ok=True)
    sides = {
        "train": (train, [pairs for pairs, _ in divided], NAMES, OBJECTS),
        "eval": (held_out, [pairs for _, pairs in divided], HELD_OUT_NAMES, HELD_OUT_OBJECTS),
    }
    for side, (count, pairs, names, objects) in sides.items():
        problems: dict[str, dict[str, str]] = {}
        while len(problems) < count:
            index = len(problems) % len(KINDS)
            record = problem(KINDS[index], rng.choice(pairs[index]), names, objects, rng)
            problems.setdefault(record["prompt"], record)
        lines = "".join(json_text(record) + "\n" for record in problems.values())
        (out / f"{side}.jsonl").write_text(lines, encoding="utf-8")
    return {"train": train, "eval": held_out}


def number(text: str) -> int:
    """Parse the number of problems to make, for argparse. It must be 1 to 2000.

    All problems are different, so that making more than 2000 could take forever.
    """
    value = int(text)
    if not 1 <= value <= 2000:
        raise argparse.ArgumentTypeError(f"{value} is not between 1 and 2000")
    return value


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder to write the data to")
    parser.add_argument("--seed", type=int, default=0, help="seed of the problems")
    parser.add_argument("--train", type=number, default=1000, help="problems to train on")
    parser.add_argument("--held-out", type=number, default=128, help="held-out problems")
    options = parser.parse_args()
    print(json_text(make(options.out, options.seed, options.train, options.held_out)))


if __name__ == "__main__":
    main()
