"""Valid data files with 150 kinds of random damage.

They give complete prompts, or one UserError that names the file.
"""

import json
import pickle
import random
import re
import time

import pyarrow
import pytest
from pyarrow import parquet

from grpo_megatron.config.data import DataConfig
from grpo_megatron.data import PromptTokenizer, load_prompts
from grpo_megatron.errors import UserError

CASES = 150
LONGEST = 30.0  # seconds to load one file
RECORDS = 40
KINDS = ("jsonl", "json", "parquet")
ODD_VALUES = (
    None,
    True,
    -1,
    2**70,
    0.5,
    float("nan"),
    float("inf"),
    "",
    " \t",
    "\ud800",
    "\x00",
    "é😀",
    [],
    [[]],
    ["a", 1],
    [3, 4, 10**6],
    [3, -1],
    {},
    {"role": "user"},
    [{"role": "user", "content": None}],
    [{"role": "user", "content": [{"type": "image", "image": "x"}]}],
    [{"role": "", "content": "1"}],
    [{}],
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from make_tiny_model import make_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer("bytes").save_pretrained(folder)
    return PromptTokenizer(str(folder))


def records() -> list[dict]:
    rows = []
    for i in range(RECORDS):
        prompt = f"What is {i} + {i}?"
        chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": prompt}]
        rows.append(
            {"prompt": chat, "answer": str(2 * i), "level": i, "source": {"name": "sums", "tags": ["a", "b"]}}
        )
    return rows


def write_rows(path, kind: str, rows: list) -> None:
    if kind == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=7)
    elif kind == "json":
        path.write_text(json.dumps(rows, indent=1))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# Of the bytes of a whole file.


def flip_bytes(rng, content):
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 3, 30))):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def cut(rng, content):
    return content[: rng.randrange(len(content))]


def cut_the_beginning(rng, content):
    return content[rng.randrange(1, len(content)) :]


def remove_a_part(rng, content):
    start = rng.randrange(len(content))
    return content[:start] + content[start + rng.randrange(1, 200) :]


def double_a_part(rng, content):
    start = rng.randrange(len(content))
    return content[: start + rng.randrange(1, 200)] + content[start:]


def insert_noise(rng, content):
    start = rng.randrange(len(content))
    return content[:start] + rng.randbytes(rng.choice((1, 10, 5000))) + content[start:]


def zero_a_part(rng, content):
    start = rng.randrange(len(content))
    part = content[start : start + rng.choice((1, 16, 4096))]
    return content[:start] + bytes(len(part)) + content[start + len(part) :]


def insert_marks(rng, content):
    start = rng.randrange(len(content))
    marks = rng.choice(
        (b"[" * 5000, b"}" * 3, b'"', b"\\", b",", b"\n", b"\xef\xbb\xbf", b"\xff\xfe", b"\\ud800")
    )
    return content[:start] + marks + content[start:]


def reencode(rng, content):
    return content.decode("latin-1").encode(
        rng.choice(("utf-16", "utf-16-le", "utf-32", "utf-8-sig", "utf-7"))
    )


BYTES = (
    flip_bytes,
    cut,
    cut_the_beginning,
    remove_a_part,
    double_a_part,
    insert_noise,
    zero_a_part,
    insert_marks,
    reencode,
)


# Of the records, written as a file again.


def odd_value(rng, rows):
    rows[rng.randrange(len(rows))][rng.choice(("prompt", "answer", "level"))] = rng.choice(ODD_VALUES)


def odd_in_a_message(rng, rows):
    rng.choice(rng.choice(rows)["prompt"])[rng.choice(("role", "content"))] = rng.choice(ODD_VALUES)


def missing_field(rng, rows):
    del rng.choice(rows)[rng.choice(("prompt", "answer"))]


def renamed_field(rng, rows):
    name = rng.choice(("prompt", "answer"))
    for row in rows[rng.randrange(len(rows)) :]:
        row[name.upper()] = row.pop(name)


def deep_nesting(rng, rows):
    value = []
    for _ in range(rng.choice((50, 70, 150))):
        value = [value]
    rng.choice(rows)[rng.choice(("level", "answer"))] = value


def not_an_object(rng, rows):
    rows[rng.randrange(len(rows))] = rng.choice((None, 1, "x", [], [1]))


def other_column(rng, rows):
    values = rng.choice(
        ([b"\xff"] * RECORDS, [b"1"] * RECORDS, [{"a": 1}] * RECORDS, [1.5] * RECORDS, [None] * RECORDS)
    )
    name = rng.choice(("prompt", "answer", "level"))
    for row, value in zip(rows, values, strict=True):
        row[name] = value


STRUCTURE = (
    odd_value,
    odd_value,
    odd_in_a_message,
    missing_field,
    renamed_field,
    deep_nesting,
    not_an_object,
    other_column,
)


def damaged(rng: random.Random, kind: str, path) -> str:
    """Write a damaged file and return the name of the damage."""
    while True:
        damage = rng.choice((*BYTES, *STRUCTURE))
        rows = records()
        try:
            if damage in STRUCTURE:
                damage(rng, rows)
            write_rows(path, kind, rows)
        except (pyarrow.ArrowException, AttributeError, OverflowError, TypeError, UnicodeEncodeError):
            continue  # this kind of file cannot hold that value at all
        if damage in BYTES:
            path.write_bytes(damage(rng, path.read_bytes()))
        return damage.__name__


def check_prompt(prompt, vocabulary: int) -> None:
    assert len(prompt.ids)
    assert prompt.ids.dtype == "int32"
    assert prompt.ids.min() >= 0
    assert prompt.ids.max() < vocabulary
    assert prompt.text.strip()
    assert isinstance(prompt.answer, str) or all(isinstance(answer, str) for answer in prompt.answer)
    json.dumps(prompt.fields)
    pickle.dumps(prompt)


@pytest.mark.slow_but(40)
@pytest.mark.parametrize("case", range(CASES))
def test_a_damaged_file(case, tmp_path, tokenizer):
    rng = random.Random(case)
    kind = KINDS[case % len(KINDS)]
    path = tmp_path / f"data.{kind}"
    damage = damaged(rng, kind, path)
    start = time.perf_counter()
    try:
        prompts, _ = load_prompts(str(path), tokenizer, DataConfig())
    except UserError as error:
        message = str(error)
        assert str(path) in message
        assert message.isprintable(), ascii(message)
        assert len(message) < 1000, message
        if kind == "jsonl" and "no records" not in message and "UTF-16" not in message:
            assert re.search(rf"{re.escape(str(path))}:\d+: ", message), message
    else:
        for prompt in prompts:
            check_prompt(prompt, tokenizer.vocab_size)
    assert time.perf_counter() - start < LONGEST, damage


def test_the_damages_are_of_both_outcomes(tmp_path, tokenizer):
    """The test above shows something only if undamaged files load and most of the damaged ones are
    refused.
    """
    for kind in KINDS:
        write_rows(tmp_path / f"whole.{kind}", kind, records())
        assert len(load_prompts(str(tmp_path / f"whole.{kind}"), tokenizer, DataConfig())[0]) == RECORDS
    refused = []
    for case in range(CASES):
        path = tmp_path / f"{case}.{KINDS[case % len(KINDS)]}"
        damage = damaged(random.Random(case), KINDS[case % len(KINDS)], path)
        try:
            load_prompts(str(path), tokenizer, DataConfig())
        except UserError:
            refused.append(damage)
    assert CASES // 2 < len(refused) < CASES
    assert len(set(refused)) >= 12
