"""A data file that was edited between two starts of a run and has the same number of records."""

import json
import os
import shutil

import pytest

from grpo_megatron.config.data import DataConfig
from grpo_megatron.config.schema import Config
from grpo_megatron.data import EpochOrder, PromptSource, PromptTokenizer, load_prompts
from grpo_megatron.data.conversations import Conversations
from grpo_megatron.data.examples import load_examples
from grpo_megatron.data.preferences import load_pairs
from grpo_megatron.data.records import open_records
from grpo_megatron.errors import UserError
from grpo_megatron.files import json_text

RECORDS = [
    {"prompt": f"{n}+1=", "answer": str(n + 1), "response": str(n), "chosen": str(n), "rejected": "x"}
    for n in range(9)
]
SUFFIXES = ["jsonl", "json", "parquet", "hf"]


@pytest.fixture(scope="module")
def tiny_tokenizer(tmp_path_factory):
    from make_tiny_model import make_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def write(path, records):
    if path.suffix == ".hf":
        datasets = pytest.importorskip("datasets")
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        (path / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        datasets.disable_progress_bars()
        return f"hf:{path}"
    if path.suffix == ".parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(records), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(records))
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def order_of(source):
    return EpochOrder(len(RECORDS), 0, True, {source: open_records(source).digest()})


def edited(change):
    records = [dict(record) for record in RECORDS]
    change(records)
    return records


EDITS = {
    "a digit of an answer": lambda records: records[4].update(answer="7"),
    "two records in each other's place": lambda records: records.insert(0, records.pop()),
    "two answers in each other's place": lambda records: (
        records[0].update(answer=RECORDS[1]["answer"]),
        records[1].update(answer=RECORDS[0]["answer"]),
    ),
    "the last character of the file": lambda records: records[-1].update(rejected="y"),
    "a letter of a prompt": lambda records: records[8].update(prompt="8-1="),
    "the name of a field": lambda records: records[0].update(zzz=records[0].pop("rejected")),
}


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_file_is_refused(suffix, edit, tmp_path):
    """Records of the old and of the new file used to be mixed within an epoch, without a message."""
    if suffix == "parquet" and edit == "the name of a field":
        pytest.skip("every record of a table has all fields")
    source = write(tmp_path / f"train.{suffix}", RECORDS)
    state = json.loads(json_text(order_of(source).state_dict()))
    assert order_of(source).must_fit(state) == ""
    write(tmp_path / f"train.{suffix}", edited(EDITS[edit]))
    with pytest.raises(UserError) as raised:
        order_of(source).must_fit(state)
    assert f"data.train: the records of {source} have changed since the checkpoint was written" in str(
        raised.value
    )
    assert "run.resume=none to start over" in str(raised.value)


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_a_file_that_was_moved_or_touched_is_the_same(suffix, tmp_path):
    source = write(tmp_path / f"train.{suffix}", RECORDS)
    state = order_of(source).state_dict()
    os.utime(source, (1, 1))
    assert order_of(source).must_fit(state) == ""
    elsewhere = shutil.move(source, tmp_path / f"renamed.{suffix}")
    assert order_of(str(elsewhere)).must_fit(state) == ""


def test_only_the_file_that_was_edited_is_named(tmp_path):
    sources = [write(tmp_path / f"{name}.jsonl", RECORDS[:4]) for name in "ab"]
    contents = {source: open_records(source).digest() for source in sources}
    state = EpochOrder(8, 0, True, contents).state_dict()
    write(tmp_path / "b.jsonl", RECORDS[4:8])
    contents[sources[1]] = open_records(sources[1]).digest()
    with pytest.raises(UserError, match=r"the records of \S+b\.jsonl have changed"):
        EpochOrder(8, 0, True, contents).must_fit(state)


def test_a_checkpoint_of_an_earlier_version_goes_on_with_a_note(tmp_path):
    source = write(tmp_path / "train.jsonl", RECORDS)
    state = order_of(source).state_dict()
    del state["contents"]
    assert "stored no checksum of the data" in order_of(source).must_fit(state)
    order = order_of(source)
    order.load_state_dict(state)
    assert order.state_dict()["contents"]


@pytest.mark.parametrize("command", ["train", "train with weights", "sft", "reward-model"])
def test_every_command_compares_its_data(command, tmp_path, tiny_tokenizer):
    """The test follows the data from the file to the state in the command's checkpoint."""

    def order():
        config = Config()
        config.data = DataConfig(train=source, chat_template="none", max_prompt_length=64)
        config.rollout.max_response_length = 64
        tokenizer = PromptTokenizer(tiny_tokenizer, config.data)
        if command == "sft":
            return EpochOrder.of(load_examples(config, tokenizer)[0], 0, True)
        if command == "reward-model":
            return EpochOrder.of(load_pairs(source, Conversations(tokenizer, 0), config.data, 64)[0], 0, True)
        prompts = load_prompts(source, tokenizer, config.data)[0]
        return PromptSource([prompts], 0, True, [1.0] if command != "train" else None)

    source = write(tmp_path / "train.jsonl", RECORDS)
    state = json.loads(json_text(order().state_dict()))
    assert order().must_fit(state) == ""
    write(tmp_path / "train.jsonl", edited(EDITS["a letter of a prompt"]))
    with pytest.raises(UserError, match="have changed since the checkpoint was written"):
        order().must_fit(state)
