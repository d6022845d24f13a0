import datetime
import json

import numpy as np
import pytest

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.config.data import DataConfig, OverlongPrompts
from grpo_megatron.data import EpochOrder, PromptSource, PromptTokenizer, load_prompts, read_records
from grpo_megatron.errors import UserError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from make_tiny_model import make_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(folder)
    return PromptTokenizer(str(folder))


def write(path, *lines):
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"prompt": "1+1", "answer": "2"', "not valid JSON"),
        ('["1+1", "2"]', "expected a JSON object, got list"),
        ('{"question": "1+1", "answer": "2"}', "field 'prompt' is missing"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, complaint):
    path = write(tmp_path / "p.jsonl", '{"prompt": "1+1", "answer": "2"}', "", line)
    with pytest.raises(UserError, match=complaint) as caught:
        read_records(path, ["prompt", "answer"])
    assert f"{path}:3:" in str(caught.value)


def test_missing_and_empty_files(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        read_records(str(tmp_path / "none.jsonl"), [])
    with pytest.raises(UserError, match="no records"):
        read_records(write(tmp_path / "e.jsonl", ""), [])


def test_prompts_get_the_chat_template(tmp_path, tokenizer):
    messages = json.dumps([{"role": "user", "content": "3+4"}])
    path = write(
        tmp_path / "p.jsonl",
        '{"prompt": "12+3", "answer": 15, "level": 1}',
        f'{{"prompt": {messages}, "answer": "7"}}',
    )
    (first, second), counts = load_prompts(path, tokenizer, DataConfig())
    assert counts == {"skipped": 0, "truncated": 0}
    assert first.text == "<user>12+3<assistant>"
    assert tokenizer.tokenizer.convert_ids_to_tokens(first.ids.tolist()) == [
        "<user>",
        "1",
        "2",
        "+",
        "3",
        "<assistant>",
    ]
    assert (first.uid, first.answer, first.fields) == (0, "15", {"level": 1})
    assert second.text == "<user>3+4<assistant>"


def test_policies_for_long_prompts(tmp_path, tokenizer):
    path = write(
        tmp_path / "p.jsonl", '{"prompt": "12+3", "answer": "15"}', '{"prompt": "1+3", "answer": "4"}'
    )

    def load(policy, longest=5):
        return load_prompts(path, tokenizer, DataConfig(max_prompt_length=longest, overlong_prompts=policy))

    with pytest.raises(
        UserError, match=r"p.jsonl:1: the prompt has 6 tokens, more than data\.max_prompt_length=5"
    ):
        load(OverlongPrompts.error)
    prompts, counts = load(OverlongPrompts.skip)
    assert [prompt.uid for prompt in prompts] == [1]
    assert counts == {"skipped": 1, "truncated": 0}
    prompts, counts = load(OverlongPrompts.truncate_left)
    assert tokenizer.tokenizer.convert_ids_to_tokens(prompts[0].ids.tolist()) == [
        "1",
        "2",
        "+",
        "3",
        "<assistant>",
    ]
    assert counts == {"skipped": 0, "truncated": 1}
    with pytest.raises(UserError, match="no prompts are left because all 2"):
        load(OverlongPrompts.skip, longest=2)


def test_system_prompt_and_suffix(tmp_path, tokenizer):
    own = json.dumps([{"role": "system", "content": "7"}, {"role": "user", "content": "1"}])
    path = write(
        tmp_path / "p.jsonl", '{"prompt": "12+3", "answer": "15"}', f'{{"prompt": {own}, "answer": "7"}}'
    )
    config = DataConfig(system_prompt="42", prompt_suffix="=?")
    prompts, _ = load_prompts(path, PromptTokenizer(tokenizer.tokenizer.name_or_path, config), config)
    assert prompts[0].text == "<system>42<user>12+3=?<assistant>"
    assert prompts[1].text == "<system>7<user>1=?<assistant>"  # keeps its own system message


def test_a_prompt_of_the_wrong_kind(tmp_path, tokenizer):
    path = write(tmp_path / "p.jsonl", '{"prompt": 5, "answer": "15"}')
    with pytest.raises(UserError, match=r"p.jsonl:1: the prompt must be a string, a list of messages"):
        load_prompts(path, tokenizer, DataConfig())


def test_parquet_reads_like_jsonl(tmp_path):
    import pyarrow
    from pyarrow import parquet

    records = [{"prompt": "1+1", "answer": "2", "level": 3}, {"prompt": "2+2", "answer": "4", "level": 4}]
    path = str(tmp_path / "p.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(records), path)
    assert list(read_records(path, ["prompt"])) == records
    with pytest.raises(
        UserError, match="record 0: field 'question' is missing; the record has 'prompt', 'answer', 'level'"
    ):
        read_records(path, ["question"])
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(UserError, match="cannot be read"):
        read_records(str(tmp_path / "broken.parquet"), [])


def test_sources_that_are_not_data(tmp_path):
    with pytest.raises(
        UserError,
        match=r"must be a .jsonl, .json or .parquet file or hf:NAME, but this file has the extension .csv",
    ):
        read_records(write(tmp_path / "p.csv", "a,b"), [])
    with pytest.raises(UserError, match="does not exist"):
        read_records(str(tmp_path / "none.parquet"), [])


def test_an_hf_dataset_from_a_local_folder(tmp_path):
    pytest.importorskip("datasets", reason="the optional package datasets is not installed")
    write(tmp_path / "train.jsonl", '{"prompt": "1+1", "answer": "2"}')
    assert list(read_records(f"hf:{tmp_path}", ["prompt"])) == [{"prompt": "1+1", "answer": "2"}]
    with pytest.raises(UserError, match=f"the folder {tmp_path}/nothing does not exist"):
        read_records(f"hf:{tmp_path}/nothing", [])


def test_a_part_of_an_hf_datasets_split_with_values_that_are_not_text(tmp_path):
    datasets = pytest.importorskip("datasets", reason="the optional package datasets is not installed")
    features = datasets.Features(
        {"prompt": datasets.Value("string"), "picture": datasets.Image(), "day": datasets.Value("date32")}
    )
    row = {"prompt": "1+1", "picture": {"bytes": b"\x89PNG", "path": None}, "day": datetime.date(2024, 2, 29)}
    datasets.Dataset.from_list([row] * 3, features=features).to_parquet(str(tmp_path / "train.parquet"))
    records = read_records(f"hf:{tmp_path}::train[:2]", ["prompt"])
    assert len(records) == 2
    picture = {"bytes": {"base64": "iVBORw=="}, "path": None}
    assert records[1] == {"prompt": "1+1", "picture": picture, "day": "2024-02-29"}


def test_weighted_sources_keep_their_shares():
    sources = [[Prompt(100 * s + i, np.array([i]), "", "") for i in range(3 + s)] for s in range(2)]
    source = PromptSource(sources, seed=0, shuffle=True, weights=[3, 1])
    prompts = source.next(40)
    source.settle(prompts)
    drawn = [prompt.uid // 100 for prompt in prompts]
    for count in range(1, 41):
        assert abs(drawn[:count].count(0) - 0.75 * count) <= 1
    restored = PromptSource(sources, seed=0, shuffle=True, weights=[3, 1])
    restored.load_state_dict(source.state_dict())
    assert [p.uid for p in restored.next(20)] == [p.uid for p in source.next(20)]


def test_other_weights_count_from_where_a_run_goes_on_with_them():
    sources = [[Prompt(1000 * s + i, np.array([i]), "", "") for i in range(500)] for s in range(2)]
    source = PromptSource(sources, seed=0, shuffle=False, weights=[9, 1])
    prompts = source.next(400)
    source.settle(prompts)
    before = {prompt.uid for prompt in prompts}
    restored = PromptSource(sources, seed=0, shuffle=False, weights=[1, 1])
    restored.load_state_dict(json.loads(json.dumps(source.state_dict())))
    after = [prompt.uid for prompt in restored.next(100)]
    assert not before & set(after)
    drawn = [uid // 1000 for uid in after]
    for count in range(1, 101):
        assert abs(drawn[:count].count(0) - 0.5 * count) <= 1


def test_each_epoch_holds_every_index_once():
    order = EpochOrder(10, seed=3, shuffle=True)
    first, second = order.take(10), order.take(10)
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert EpochOrder(10, seed=3, shuffle=True).take(10) == first
    assert EpochOrder(3, seed=0, shuffle=False).take(7) == [0, 1, 2, 0, 1, 2, 0]


def test_the_order_continues_from_its_state():
    order = EpochOrder(10, seed=3, shuffle=True)
    order.take(13)
    restored = EpochOrder(10, seed=3, shuffle=True)
    restored.load_state_dict(order.state_dict())
    assert restored.take(20) == order.take(20)
    with pytest.raises(UserError, match="11"):
        EpochOrder(11, seed=3, shuffle=True).load_state_dict(order.state_dict())


def test_prompt_source_hands_out_prompts():
    prompts = [Prompt(i, np.array([i]), str(i), str(i)) for i in range(3)]
    source = PromptSource([prompts[:2], prompts[2:]], seed=0, shuffle=False)
    assert [p.uid for p in source.next(4)] == [0, 1, 2, 0]
    assert source.epoch == 1
