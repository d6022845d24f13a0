"""Data files of every kind, and values of every type in them."""

import datetime
import decimal
import gc
import json
import os
import pickle
import subprocess
import sys
import tracemalloc

import pyarrow
import pytest
from pyarrow import parquet

from grpo_megatron.config.data import DataConfig
from grpo_megatron.data import PromptSource, PromptTokenizer, load_prompts, read_records
from grpo_megatron.data.lazy import ConcatSequence
from grpo_megatron.errors import UserError

A, B = {"prompt": "1+1", "answer": "2"}, {"prompt": "2+2", "answer": "4", "more": {"n": [1, None, "x,]}"]}}
LINES = json.dumps(A) + "\n" + json.dumps(B) + "\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from make_tiny_model import make_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(folder)
    return PromptTokenizer(str(folder))


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def write_table(path, *args, **options):
    parquet.write_table(pyarrow.table(*args), path, **options)
    return str(path)


def refused(path, keys=("prompt",)) -> str:
    with pytest.raises(UserError) as caught:
        read_records(str(path), list(keys))
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("p.jsonl", LINES),
        ("p.JSONL", LINES),
        ("p.json", LINES),
        ("p.jsonl", b"\xef\xbb\xbf" + LINES.encode()),
        ("p.jsonl", LINES.replace("\n", "\r\n")),
        ("p.jsonl", LINES.replace("\n", "\n \n\n")),
        ("p.jsonl", LINES.rstrip()),
        ("p.json", json.dumps([A, B])),
        ("p.JSON", " \n" + json.dumps([A, B], indent=2) + "\n\n"),
        ("p.json", b"\xef\xbb\xbf" + json.dumps([A, B]).encode()),
    ],
)
def test_json_files_of_every_form(tmp_path, name, content):
    records = read_records(write(tmp_path / name, content), ["prompt"])
    assert list(records) == [A, B]
    assert records[-1] == B
    with pytest.raises(IndexError):
        records[2]


@pytest.mark.slow
def test_an_array_longer_than_the_blocks_it_is_read_in(tmp_path):
    """Strings cross the ends of blocks, one is longer than a block, and marks and escaped quotes occur in
    them.
    """
    rows = [{"prompt": str(i), "text": '[{"\\,' * (i * 97 % 3000)} for i in range(800)]
    rows.insert(400, {"prompt": "long", "text": '\\"' * 2**21})
    path = write(tmp_path / "p.json", json.dumps(rows))
    assert os.path.getsize(path) > 8 * 2**20
    assert list(read_records(path, ["prompt"])) == rows


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("p.jsonl", LINES + '{"prompt": "3+', "p.jsonl:3: not valid JSON (Unterminated string"),
        ("p.jsonl", LINES.replace("\n", "\r\n") + "\r\n[1]", "p.jsonl:4: expected a JSON object, got list"),
        ("p.jsonl", LINES.encode() + b'{"prompt": "\xff"}', "p.jsonl:3: not valid UTF-8"),
        ("p.jsonl", LINES.encode("utf-16"), "p.jsonl: the file is UTF-16"),
        ("p.jsonl", '{"prompt": "1", "prompt": "2"}', "p.jsonl:1: key 'prompt' occurs twice"),
        (
            "p.jsonl",
            '{"prompt": ' + "[" * 100000 + "]" * 100000 + "}",
            "p.jsonl:1: the record is nested too deeply",
        ),
        (
            "p.jsonl",
            '{"prompt": ' + "[" * 100 + "]" * 100 + "}",
            "p.jsonl:1: field 'prompt' is nested more than 64",
        ),
        (
            "p.jsonl",
            '{"prompt": "1\\ud800"}',
            "p.jsonl:1: field 'prompt' contains half of a surrogate pair ('\\ud800')",
        ),
        (
            "p.jsonl",
            '{"prompt": "1", "a": {"\\udc00": 1}}',
            "p.jsonl:1: field 'a' contains half of a surrogate pair",
        ),
        ("p.jsonl", '{"prompt": ' + "1" * 5000 + "}", "p.jsonl:1: Exceeds the limit"),
        ("p.jsonl", '{"prompt": null}', "p.jsonl:1: field 'prompt' is null"),
        ("p.jsonl", '{"Prompt": "1"}', "p.jsonl:1: field 'prompt' is missing; the record has 'Prompt'"),
        ("p.jsonl", b"\x00" * 40, "p.jsonl:1: not valid JSON"),
        ("p.jsonl", b"\xef\xbb\xbf \n", "p.jsonl contains no records"),
        ("p.json", " [ ] ", "p.json contains no records"),
        ("p.json", "[1]", "p.json: record 0: expected a JSON object, got int"),
        ("p.json", json.dumps([A])[:-1] + ",]", "p.json: record 1: not valid JSON"),
        ("p.json", json.dumps([A, B])[:-20], "p.json: record 1: the file ends in the middle of the array"),
        ("p.json", json.dumps([A]) + "\n" + LINES, "p.json: there is more text after the end of the array"),
        ("p.json", '[{"prompt": "1"]}', "p.json: record 0: not valid JSON"),
        ("p.json", '{\n  "data": []\n}', "p.json:1: not valid JSON"),
        ("p.jsonl.gz", b"\x1f\x8b", "is compressed"),
        (
            "p.txt",
            "1",
            "data must be a .jsonl, .json or .parquet file or hf:NAME, but this file has the extension .txt",
        ),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, content, complaint):
    assert complaint in refused(write(tmp_path / name, content))


def test_a_folder_and_a_file_that_may_not_be_read(tmp_path):
    assert f"is a folder, not a file; give the files in it, or hf:{tmp_path}" in refused(tmp_path)


def test_values_of_parquet_columns_become_plain_python(tmp_path):
    day = datetime.date(2024, 2, 29)
    columns = {
        "prompt": pyarrow.array(["1"]).dictionary_encode(),
        "text": pyarrow.array([b"caf\xc3\xa9"]),
        "picture": pyarrow.array([{"bytes": b"\xff\xd8\x00", "path": "a.jpg"}]),
        "day": pyarrow.array([day]),
        "moment": pyarrow.array([datetime.datetime(2024, 2, 29, 12)], pyarrow.timestamp("us", "UTC")),
        "span": pyarrow.array([datetime.timedelta(minutes=1)]),
        "price": pyarrow.array([decimal.Decimal("1.50")]),
        "map": pyarrow.array([[("a", 1)]], pyarrow.map_(pyarrow.string(), pyarrow.int64())),
        "nested": pyarrow.array([{"a": [[1, 2], []], "b": None}]),
        "half": pyarrow.array([0.5], pyarrow.float16()),
    }
    [record] = read_records(write_table(tmp_path / "p.Parquet", columns), ["prompt"])
    assert record == {
        "prompt": "1",
        "text": "café",
        "picture": {"bytes": {"base64": "/9gA"}, "path": "a.jpg"},
        "day": "2024-02-29",
        "moment": "2024-02-29T12:00:00+00:00",
        "span": 60.0,
        "price": "1.50",
        "map": [["a", 1]],
        "nested": {"a": [[1, 2], []], "b": None},
        "half": 0.5,
    }
    assert pickle.loads(pickle.dumps(record)) == record
    assert json.loads(json.dumps(record)) == record


def test_parquet_files_that_cannot_be_read(tmp_path):
    path = write_table(
        tmp_path / "p.parquet", {"prompt": [f"{i:09d}" for i in range(5000)]}, compression="none"
    )
    whole = (tmp_path / "p.parquet").read_bytes()
    for content in (b"", b"PAR1", b"PAR1" * 10, whole[: len(whole) // 2], whole[10:], whole[:-9] + bytes(9)):
        assert "cannot be read" in refused(write(tmp_path / "p.parquet", content))
    # Text that is not UTF-8: the file itself does not know.
    bad = pyarrow.Array.from_buffers(pyarrow.string(), 1, pyarrow.array([b"\xff"]).buffers())
    assert "p.parquet: record 0 cannot be read" in refused(write_table(path, [bad], ["prompt"]))
    write_table(path, pyarrow.table([[1], [2]], names=["prompt", "prompt"]).columns, ["prompt", "prompt"])
    assert "several columns named 'prompt'" in refused(path)
    assert "contains no records" in refused(
        write_table(path, {"prompt": pyarrow.array([], pyarrow.string())})
    )
    assert "field 'prompt' is null" in refused(write_table(path, {"prompt": ["1", None]}))


def test_parquet_is_read_by_row_group(tmp_path, monkeypatch):
    monkeypatch.setattr("grpo_megatron.data.arrow_records._CACHE_BYTES", 3 * 10 * 11_000)
    rows = [{"prompt": f"{i:010000d}"} for i in range(295)]
    path = write_table(tmp_path / "p.parquet", {"prompt": [row["prompt"] for row in rows]}, row_group_size=10)
    gc.collect()  # what earlier tests left must not go in between
    before = pyarrow.total_allocated_bytes()
    records = read_records(path, ["prompt"])
    assert len(records) == 295
    for number in (294, 0, 57, 58, 9, 10, 0):
        assert records[number] == rows[number]
        assert 0 < pyarrow.total_allocated_bytes() - before < 0.3 * 295 * 10_000


def test_verls_own_files(tmp_path, tokenizer):
    """Their prompt is a list of messages, and the answer a field of an object."""
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": "1+1"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "2"},
            "extra_info": {"index": 0, "split": "train"},
        }
    ]
    path = str(tmp_path / "train.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    [prompt], _ = load_prompts(path, tokenizer, DataConfig(answer_key="reward_model.ground_truth"))
    assert (prompt.text, prompt.answer) == ("<user>1+1<assistant>", "2")
    assert prompt.fields == {key: value for key, value in rows[0].items() if key != "prompt"}
    with pytest.raises(
        UserError, match=r"record 0: field 'answer' is missing; the record has 'data_source', 'prompt'"
    ):
        load_prompts(path, tokenizer, DataConfig())
    with pytest.raises(
        UserError,
        match=r"field 'reward_model' is \{'style'.*to use a field inside an object, set data.answer_key",
    ):
        load_prompts(path, tokenizer, DataConfig(answer_key="reward_model"))


def test_a_key_with_a_dot_that_is_there_wins(tmp_path, tokenizer):
    path = write(tmp_path / "p.jsonl", '{"prompt": "1", "a.b": "literal", "a": {"b": "nested"}}')
    [prompt], _ = load_prompts(path, tokenizer, DataConfig(answer_key="a.b"))
    assert prompt.answer == "literal"


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ('"x"', "x"),
        ("15", "15"),
        ("15.0", "15"),
        ("0.1", "0.1"),
        ("-1e-7", "-0.0000001"),
        ("true", "True"),
        ('["2", 3.0]', ["2", "3"]),
    ],
)
def test_answers_as_text(tmp_path, tokenizer, answer, text):
    path = write(tmp_path / "p.jsonl", f'{{"prompt": "1", "answer": {answer}}}')
    assert load_prompts(path, tokenizer, DataConfig())[0][0].answer == text


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        ("NaN", "is nan; a reference answer must be finite"),
        ("-Infinity", "is -inf; a reference"),
        ("null", "is null"),
        ("{}", r"is \{\}; a reference answer must be a string"),
        ("[]", "is an empty list"),
        ('["1", null]', "item 1 is None; a reference answer must be"),
        ('[["1"]]', r"item 0 is \['1'\]; a reference answer must be"),
    ],
)
def test_answers_that_reward_nothing(tmp_path, tokenizer, answer, complaint):
    path = write(
        tmp_path / "p.jsonl", f'{{"prompt": "1", "answer": "1"}}\n{{"prompt": "1", "answer": {answer}}}'
    )
    with pytest.raises(UserError, match=f"p.jsonl:2: field 'answer'.* ?{complaint}"):
        load_prompts(path, tokenizer, DataConfig())


def test_a_file_that_changes_during_the_run(tmp_path, tokenizer):
    path = write(tmp_path / "p.jsonl", LINES)
    prompts, _ = load_prompts(path, tokenizer, DataConfig())
    (tmp_path / "new").write_text(LINES.replace("1+1", "3+3"))
    os.replace(tmp_path / "new", path)
    assert prompts[0].text == "<user>1+1<assistant>"  # the old file is still open
    again, _ = load_prompts(path, tokenizer, DataConfig())
    with open(path, "a") as file:
        file.write("{}\n")
    with pytest.raises(UserError, match=r"p.jsonl has changed since it was opened"):
        again[0]


def test_a_chain_of_sequences():
    chain = ConcatSequence([[1, 2], [], [3]])
    assert list(chain) == [1, 2, 3]
    assert chain[-1] == 3
    with pytest.raises(IndexError):
        chain[3]


BIG = 20_000  # bytes of each record


def write_big(path, count):
    with open(path, "w") as file:
        for number in range(count):
            file.write(json.dumps({"prompt": f"{number}+1", "answer": "2", "more": "x" * BIG}) + "\n")
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_memory_does_not_grow_with_the_file(tmp_path, tokenizer, kind):
    """The peak over loading and handing out all prompts stays below a tenth of the file."""
    path = write_big(tmp_path / "p.jsonl", 1000)
    if kind == "json":
        path = write(tmp_path / "p.json", f"[{','.join((tmp_path / 'p.jsonl').read_text().splitlines())}]")
    load_prompts(path, tokenizer, DataConfig(), 0)[0][0]  # imports and caches
    tracemalloc.start()
    source = PromptSource([load_prompts(path, tokenizer, DataConfig())[0]], seed=0, shuffle=True)
    drawn = [prompt.uid for _ in range(100) for prompt in source.next(10)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sorted(drawn) == list(range(1000))
    assert peak < 1000 * BIG / 10


LOAD = """
import sys
from grpo_megatron.config.data import DataConfig
from grpo_megatron.data import PromptSource, PromptTokenizer, load_prompts

def most_resident():
    [line] = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024

tokenizer = PromptTokenizer(sys.argv[1])
load_prompts(sys.argv[2], tokenizer, DataConfig())
before = most_resident()
source = PromptSource([load_prompts(sys.argv[3], tokenizer, DataConfig())[0]], seed=0, shuffle=True)
loaded = most_resident()
for _ in range(100):
    source.next(32)
print(before, loaded, most_resident())
"""


@pytest.mark.slow
def test_resident_memory_stays_bounded_on_a_large_file(tmp_path, tokenizer):
    """Loading 300 MB of JSON Lines and a hundred steps add less than 20 MB to the process's largest size."""
    small, path = write_big(tmp_path / "small.jsonl", 100), write_big(tmp_path / "p.jsonl", 15_000)
    assert os.path.getsize(path) > 300e6
    arguments = [tokenizer.tokenizer.name_or_path, small, path]
    out = subprocess.run(
        [sys.executable, "-c", LOAD, *arguments], capture_output=True, text=True, check=True
    ).stdout
    before, loaded, after = map(int, out.split())
    print(
        f"resident at most: {before / 1e6:.0f} MB before, {loaded / 1e6:.0f} once loaded, "
        f"{after / 1e6:.0f} after 100 steps"
    )
    assert after - before < 20e6
