"""Data sets of the datasets library in folders, and the nulls that Arrow puts into records."""

import json

import pytest

from grpo_megatron.config.data import DataConfig
from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.config.schema import Config, ModelConfig
from grpo_megatron.data import PromptTokenizer, load_prompts, read_records
from grpo_megatron.data.examples import load_examples
from grpo_megatron.errors import UserError
from grpo_megatron.preflight.check import check
from tests.unit.chat_templates import save_tokenizer

datasets = pytest.importorskip("datasets", reason="the optional package datasets is not installed")
ROWS = [{"prompt": f"{number}+1", "answer": str(number + 1)} for number in range(4)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders that save_to_disk wrote: one data set, and one with splits."""
    folder = tmp_path_factory.mktemp("saved")
    one = datasets.Dataset.from_list(ROWS)
    one.save_to_disk(folder / "one")
    datasets.DatasetDict({"train": one, "test": one.select([3])}).save_to_disk(folder / "several")
    datasets.DatasetDict({"first": one, "second": one}).save_to_disk(folder / "named")
    return folder


@pytest.mark.parametrize(
    ("source", "rows"),
    [
        ("one", ROWS),
        ("several", ROWS),
        ("several::train", ROWS),
        ("several::test", ROWS[3:]),
        ("named::second", ROWS),
    ],
)
def test_a_folder_that_save_to_disk_wrote_is_read(saved, source, rows):
    """load_dataset refuses such a folder, and this program used to recommend load_dataset."""
    assert list(read_records(f"hf:{saved}/{source}", ["prompt"])) == rows


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("one::train", "a single dataset written by save_to_disk, so it has no splits; use hf:"),
        ("one:main", "has no configuration 'main'; use hf:FOLDER::SPLIT"),
        ("several::dev", "has no split 'dev'; its splits are test, train; choose one with hf:"),
        ("several::train[:2]", "has no split 'train[:2]'; its splits are test, train"),
        ("named", "has no split 'train'; its splits are first, second"),
        ("nothing", "/nothing does not exist"),
    ],
)
def test_a_part_that_such_a_folder_does_not_have(saved, source, complaint):
    with pytest.raises(UserError) as caught:
        read_records(f"hf:{saved}/{source}", [])
    assert complaint in str(caught.value)
    assert "that the hub can be reached" not in str(caught.value)


def test_files_whose_columns_differ_are_named_with_the_librarys_reason(tmp_path):
    """The library's own message says only that an error occurred."""
    (tmp_path / "a.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    (tmp_path / "b.jsonl").write_text('{"question": "1", "level": 2}\n')
    with pytest.raises(UserError, match="cannot be loaded") as caught:
        read_records(f"hf:{tmp_path}", [])
    assert "question" in str(caught.value)
    assert "hub" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [("t.jsonl", '{"prompt": \n', "JSON"), ("t.parquet", "PAR1", "Parquet"), ("t.bin", "?", "data files")],
)
def test_files_that_the_library_cannot_read(tmp_path, name, content, reason):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match="cannot be loaded") as caught:
        read_records(f"hf:{tmp_path}", [])
    assert reason in str(caught.value)


def checked(*sources, **more):
    settings = [f"{key}={value}" for key, value in more.items()]
    return check(None, [f"data.train=[{','.join(sources)}]", *settings])


def test_check_reads_folders_that_are_here(saved, tmp_path):
    """`check` used to skip all sources of the library, so that only the run found their faults."""
    good = f"hf:{saved}/several::test"
    report = checked(good)
    assert any(f"fields of data.train {good}" == what for what in report.checked)
    assert not any("hf:" in what for what in report.not_checked)
    report = checked(f"hf:{saved}/named", **{"data.prompt_key": "question"})
    assert any("has no split 'train'" in violation for violation in report.violations)
    report = checked(good, **{"data.prompt_key": "question"})
    assert any("record 0: field 'question' is missing" in violation for violation in report.violations)
    report = checked(f"{saved}/one")
    assert any(
        f"{saved}/one is a folder, not a file; give the files in it, or hf:{saved}/one" in one
        for one in report.violations
    )
    report = checked("hf:openai/gsm8k:main:train", f"hf:{tmp_path}/nothing")
    assert "data.train: hf:openai/gsm8k:main:train is read from a hub" in report.not_checked
    assert f"data.train: hf:{tmp_path}/nothing is not a folder here" in report.not_checked


# --- nulls

CALLS = [
    {"function": {"name": "add", "arguments": {"a": 1, "more": [{"b": 2}]}}},
    {"function": {"name": "find", "arguments": {"text": "x", "within": {"city": "Ulm"}, "more": [{"c": 3}]}}},
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}},
    },
    {
        "type": "function",
        "function": {
            "name": "find",
            "parameters": {"properties": {"text": {"enum": ["x"]}}, "required": ["text"]},
        },
    },
]
CHATS = [
    {
        "prompt": [
            {"role": "user", "content": f"{number}?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "f", "content": "1"},
        ],
        "response": [{"role": "assistant", "content": "2", "tool_calls": [call]}],
        "tools": [tool],
        "answer": "2",
        "more": {f"key{number}": number},
    }
    for number, (call, tool) in enumerate(zip(CALLS, TOOLS, strict=True))
]


def in_form(form, folder):
    """Write the CHATS as a file or folder and return the source."""
    table = datasets.Dataset.from_list(CHATS)
    if form == "jsonl":
        (folder / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHATS))
    elif form == "parquet":
        table.to_parquet(folder / "c.parquet")
    elif form == "save_to_disk":
        table.save_to_disk(folder / "c")
    else:
        (folder / "c").mkdir()
        table.to_parquet(folder / "c" / "train.parquet")
    return {"jsonl": f"{folder}/c.jsonl", "parquet": f"{folder}/c.parquet"}.get(form, f"hf:{folder}/c")


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.mark.parametrize("form", ["parquet", "save_to_disk", "hf"])
def test_keys_that_a_record_lacks_are_not_in_its_prompt(tmp_path, qwen3, form):
    """Arrow gives each object all objects' keys, with null.

    Prompts used to show calls with arguments that no record had.
    """
    texts = {}
    for kind in ("jsonl", form):
        source = in_form(kind, tmp_path)
        data = DataConfig(train=source)
        tokenizer = PromptTokenizer(qwen3, data)
        prompts, _ = load_prompts(source, tokenizer, data)
        config = Config(
            model=ModelConfig(path=qwen3), data=data, rollout=RolloutConfig(max_response_length=900)
        )
        learned = [
            tokenizer.decode_all(example.response_ids) for example in load_examples(config, tokenizer)[0]
        ]
        texts[kind] = [prompt.text for prompt in prompts], [prompt.tools for prompt in prompts], learned
        assert "null" not in "".join([*texts[kind][0], *learned])
        assert '{"a": 1, "more": [{"b": 2}]}' in learned[0]
        assert '"arguments": {"a": 1, "more": [{"b": 2}]}' in prompts[0].text
        if kind == "jsonl":
            assert prompts[0].fields["more"] == {"key0": 0}
    assert {name: len(parts[0]) for name, parts in texts.items()} == {"jsonl": 2, form: 2}
    assert texts["jsonl"][0][0] == texts[form][0][0]
    assert [sorted(tool[0]["function"]) for tool in texts[form][1]] == [["name", "parameters"]] * 2


def test_nulls_that_were_written_stay(tmp_path, qwen3):
    """An argument that is null in JSON was given as null. A reward sees its record as the file has it."""
    call = {"function": {"name": "find", "arguments": {"within": None, "more": [None, 1]}}, "id": None}
    chat = [
        {"role": "user", "content": "?", "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    row = {"prompt": [*chat, {"role": "tool", "content": "1"}], "answer": "2", "info": {"a": None}}
    (tmp_path / "c.jsonl").write_text(json.dumps(row) + "\n")
    [prompt], _ = load_prompts(f"{tmp_path}/c.jsonl", PromptTokenizer(qwen3), DataConfig())
    assert '"arguments": {"within": null, "more": [null, 1]}' in prompt.text
    assert prompt.fields == {"info": {"a": None}}
    datasets.Dataset.from_list([{**row, "info": {"a": None, "b": 1}}]).to_parquet(tmp_path / "c.parquet")
    [prompt], _ = load_prompts(f"{tmp_path}/c.parquet", PromptTokenizer(qwen3), DataConfig())
    assert '"arguments": {"more": [null, 1]}' in prompt.text
    assert prompt.fields == {"info": {"a": None, "b": 1}}
