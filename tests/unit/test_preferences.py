"""Preferences: from records to pairs, micro-batches and the loss of a reward model."""

import json
import math
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_megatron.algorithm.preferences import PairInputs, PreferenceLoss
from grpo_megatron.batch.layout import Layout
from grpo_megatron.batch.pairs import PairBatch, schedule_pairs
from grpo_megatron.batch.schedule import CostModel
from grpo_megatron.commands.reward_model import _Training
from grpo_megatron.config.command import Command
from grpo_megatron.config.data import DataConfig, OverlongPrompts
from grpo_megatron.config.load import read_config
from grpo_megatron.data import PromptTokenizer
from grpo_megatron.data.conversations import Conversations, pad_token
from grpo_megatron.data.preferences import load_pairs
from grpo_megatron.errors import UserError
from grpo_megatron.metrics import Std, merge, to_floats

PROMPT = "1+1"
ASKED = [{"role": "user", "content": PROMPT}]


def said(text):
    return {"role": "assistant", "content": text}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from make_tiny_model import make_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 64}))
    return str(folder)


@pytest.fixture(scope="module")
def conversations(folder):
    return Conversations(PromptTokenizer(folder), pad=0)


def load(tmp_path, conversations, *records, longest=16, **data):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return load_pairs(str(path), conversations, DataConfig(**data), longest)


def text(conversations, ids):
    return "".join(conversations.tokenizer.tokenizer.convert_ids_to_tokens(ids.tolist()))


# --- the loss


def test_the_loss_by_hand():
    """Two pairs: scores 1 and 0 with margin 0, and 0 and 2 with margin 0.5."""
    scores = torch.tensor([1.0, 0.0, 0.0, 2.0], requires_grad=True)
    loss, metrics = PreferenceLoss()(scores, PairInputs(torch.full((2,), 0.5), torch.tensor([0.0, 0.5])))
    expected = [math.log(1 + math.exp(-1)), math.log(1 + math.exp(2.5))]
    torch.testing.assert_close(loss, torch.tensor(expected))
    (torch.tensor([0.5, 0.5]) * loss).sum().backward()
    slopes = [1 / (1 + math.exp(1)), 1 / (1 + math.exp(-2.5))]  # sigmoid(margin - difference)
    torch.testing.assert_close(scores.grad, torch.tensor([-slopes[0], slopes[0], -slopes[1], slopes[1]]) / 2)
    assert to_floats(metrics) == pytest.approx(
        {
            "reward_model/loss": sum(expected) / 2,
            "reward_model/accuracy": 0.5,
            "reward_model/margin": -0.5,
            "reward_model/score_mean": 0.75,
            "reward_model/score_std": np.std([1, 0, 0, 2]),
        }
    )


def test_equal_scores_are_not_accurate():
    """A reward model that gives every response the same score has told no pair apart."""
    _, metrics = PreferenceLoss()(torch.ones(4), PairInputs(torch.full((2,), 0.5), torch.zeros(2)))
    assert to_floats(metrics)["reward_model/accuracy"] == 0


@given(st.lists(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=5), min_size=1, max_size=4))
def test_a_standard_deviation_of_parts_is_that_of_the_whole(parts):
    whole = merge([{"std": Std.of(torch.tensor(part))} for part in parts])["std"].concrete()
    assert whole.result() == pytest.approx(
        np.std(np.concatenate(parts).astype(np.float32).astype(np.float64)), abs=1e-4
    )


# --- micro-batches


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=8, max_size=24),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 4]),
)
def test_both_sequences_of_a_pair_are_together(pairs, dp, multiple):
    lengths = np.array(pairs).ravel()
    plan = schedule_pairs(lengths, 100, dp=dp, sequence_multiple=multiple)
    assert sorted(i for rank in range(dp) for i in plan.sequences(rank)) == list(range(len(lengths)))
    for micro_batch in (mb for rank in plan.micro_batches for mb in rank):
        assert list(micro_batch[0::2]) == [i - 1 for i in micro_batch[1::2]]
        assert all(i % 2 == 0 for i in micro_batch[0::2])
        assert sum(-(-int(lengths[i]) // multiple) * multiple for i in micro_batch) <= 100


@pytest.mark.parametrize("attention", [{"per_pair": 0.005}, {"per_pair": 0.0, "windows": ((64, 0.02),)}])
def test_replicas_share_the_cost_of_pairs_not_of_sequences_twice_as_long(attention):
    """The sequences of a pair do not attend to each other: two of 300 tokens cost less than one of 600.

    If a pair counted as one sequence of the joint length, the busier replica would do 2 % more than the mean,
    instead of 0.03 %.
    """
    cost, draw, excess = CostModel(per_token=1.0, **attention), np.random.default_rng(0), []
    for _ in range(60):
        lengths = np.repeat(np.clip(draw.lognormal(4, 1, 24), 4, 600).astype(int), 2)
        plan = schedule_pairs(lengths, 1600, cost, dp=2)
        work = [cost.flops(lengths[plan.sequences(rank)]).sum() for rank in range(2)]
        excess.append(max(work) / np.mean(work) - 1)
    assert np.median(excess) < 0.002


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=6),
    st.sampled_from([(1, 1, False), (2, 1, False), (2, 1, True), (1, 2, False), (2, 2, True)]),
    st.booleans(),
)
def test_every_last_token_is_found_once(lengths, sizes, padded):
    """It is on one CP rank and, under SP, on one TP rank, and it is the sequence's last token."""
    tp, cp, sequence_parallel = sizes
    tokens = np.arange(1, sum(lengths) + 1)
    ends = np.cumsum(lengths)
    found = {}
    for cp_rank in range(cp):
        layout = Layout(tp, cp, cp_rank, sequence_parallel, pack_tokens=240 if padded else 0)
        pack = layout.pack(lengths)
        assert pack.num_sequences == len(lengths)
        local = pack.scatter(tokens)
        for tp_rank in range(tp if sequence_parallel else 1):
            share = layout.tensor_parallel_share(local, tp_rank)
            for row, sequence in zip(*pack.last_tokens(tp_rank), strict=True):
                assert sequence not in found
                found[sequence] = int(share[row])
    assert found == {i: int(end) for i, end in enumerate(ends)}


# --- records


FORMS = {
    "texts": {"prompt": PROMPT, "chosen": "2", "rejected": "3"},
    "messages as prompt": {"prompt": ASKED, "chosen": "2", "rejected": "3"},
    "messages of the assistant": {"prompt": PROMPT, "chosen": [said("2")], "rejected": [said("3")]},
    "whole conversations": {"chosen": [*ASKED, said("2")], "rejected": [*ASKED, said("3")]},
    "a prompt that conversations repeat": {
        "prompt": PROMPT,
        "chosen": [*ASKED, said("2")],
        "rejected": [*ASKED, said("3")],
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_a_pair_in_every_form(tmp_path, conversations, form):
    pairs, _ = load(tmp_path, conversations, FORMS[form])
    [pair] = pairs
    for example, response in ((pair.chosen, "2"), (pair.rejected, "3")):
        assert text(conversations, example.prompt_ids) == "<user>1+1<assistant>"
        assert text(conversations, example.response_ids) == f"{response}<eos>"


def test_a_conversation_of_several_turns(tmp_path, conversations):
    more = [said("2"), {"role": "user", "content": "2+2"}]
    [pair], _ = load(
        tmp_path, conversations, {"prompt": PROMPT, "chosen": [*more, said("4")], "rejected": "5"}
    )
    assert text(conversations, pair.chosen.prompt_ids) == "<user>1+1<assistant>2<eos><user>2+2<assistant>"


def test_weights_and_margins_of_a_batch(tmp_path, conversations):
    records = [{"prompt": PROMPT, "chosen": "2", "rejected": str(i), "better_by": i} for i in (3, 4)]
    pairs, _ = load(tmp_path, conversations, *records, margin_key="better_by")
    batch = PairBatch.of_pairs(pairs, 0.5)
    assert batch.margin.tolist() == [3, 4]
    assert batch.weight.tolist() == [0.5, 0.5]
    assert batch.lengths.tolist() == [one.num_tokens for p in pairs for one in (p.chosen, p.rejected)]


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        ({"prompt": PROMPT, "chosen": "2"}, "field 'rejected' is missing"),
        ({"chosen": "2", "rejected": "3"}, "field 'prompt' is missing"),
        ({"prompt": PROMPT, "chosen": 2, "rejected": "3"}, "field 'chosen'"),
        ({"prompt": PROMPT, "chosen": [], "rejected": "3"}, "field 'chosen'"),
        (
            {"prompt": PROMPT, "chosen": ASKED, "rejected": "3"},
            "must have the role 'assistant', not 'user'",
        ),
        (
            {"prompt": PROMPT, "chosen": "", "rejected": "3"},
            "the response in field 'chosen' has no tokens",
        ),
        (
            {"prompt": PROMPT, "chosen": "2", "rejected": "3", "by": "much"},
            "field 'by' must be a finite number",
        ),
        ({"prompt": PROMPT, "chosen": "2", "rejected": "3", "by": -1}, "field 'by' must be a finite number"),
        (
            {"prompt": PROMPT * 9, "chosen": "2", "rejected": "3", "by": 0},
            "has 29 prompt and 2 response tokens",
        ),
        ({"prompt": PROMPT, "chosen": "2" * 16, "rejected": "3", "by": 0}, "17 response tokens, more than"),
    ],
)
def test_a_bad_record_is_named(tmp_path, conversations, record, complaint):
    margin = {"margin_key": "by"} if "by" in record else {}
    with pytest.raises(UserError, match=r"pairs\.jsonl:1") as error:
        load(tmp_path, conversations, record, max_prompt_length=20, **margin)
    assert complaint in str(error.value)


def test_what_is_too_long_or_alike_is_left_out_and_counted(tmp_path, conversations):
    records = [
        {"prompt": PROMPT * 9, "chosen": "2", "rejected": "3"},
        {"prompt": PROMPT, "chosen": "2" * 16, "rejected": "3"},
        {"prompt": PROMPT, "chosen": "2", "rejected": "2"},
        {"prompt": PROMPT, "chosen": "2", "rejected": "3"},
    ]
    pairs, counts = load(
        tmp_path, conversations, *records, max_prompt_length=20, overlong_prompts=OverlongPrompts.skip
    )
    assert len(pairs) == 1
    assert counts == {"too long": 2, "with two identical responses": 1}
    with pytest.raises(UserError, match="no pairs are left"):
        load(tmp_path, conversations, records[2])


def test_prompts_can_be_cut_and_responses_not(tmp_path, conversations):
    cut = {"max_prompt_length": 20, "overlong_prompts": OverlongPrompts.truncate_left}
    [pair], _ = load(tmp_path, conversations, {"prompt": PROMPT * 9, "chosen": "2", "rejected": "3"}, **cut)
    assert text(conversations, pair.chosen.prompt_ids).endswith("1+1<assistant>")
    assert len(pair.chosen.prompt_ids) == 20
    with pytest.raises(UserError, match="17 response tokens"):
        load(tmp_path, conversations, {"prompt": PROMPT, "chosen": "2" * 16, "rejected": "3"}, **cut)


# --- where a conversation ends


@pytest.mark.parametrize("stopped", ["2<eos>", "2"])
def test_an_end_token_is_there_once(conversations, stopped):
    ids = conversations.tokenizer.encode(stopped)
    assert text(conversations, conversations.finished(ids)) == "2<eos>"


def test_what_the_template_puts_behind_a_response(folder, tmp_path):
    (tmp_path / "chatml.jinja").write_text(
        "{% for m in messages %}({{ m['content'] }}<eos>#{% endfor %}"
        "{% if add_generation_prompt %}({% endif %}"
    )
    tokenizer = PromptTokenizer(folder, DataConfig(chat_template=str(tmp_path / "chatml.jinja")))
    conversations = Conversations(tokenizer, pad=None)
    for response in ("2", "2<eos>", "2<eos>#"):
        assert text(conversations, conversations.finished(tokenizer.encode(response))) == "2<eos>#"


def test_a_last_token_that_is_padding_is_left_out(folder):
    """transformers would score the token before it."""
    tokenizer = PromptTokenizer(folder)
    conversations = Conversations(tokenizer, pad=tokenizer.tokenizer.eos_token_id)
    assert text(conversations, conversations.finished(tokenizer.encode("2<eos>"))) == "2"
    assert not len(conversations.finished(tokenizer.encode("<eos>")))


def test_a_template_without_responses_is_refused(folder, tmp_path):
    (tmp_path / "deaf.jinja").write_text(
        "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}"
    )
    tokenizer = PromptTokenizer(folder, DataConfig(chat_template=str(tmp_path / "deaf.jinja")))
    with pytest.raises(UserError, match="leaves out the assistant's messages"):
        Conversations(tokenizer, pad=None)


def test_the_padding_of_a_new_reward_model(folder, tmp_path):
    assert pad_token(folder) == 0  # of the tokenizer
    (tmp_path / "config.json").write_text(json.dumps({"pad_token_id": 7}))
    assert pad_token(str(tmp_path)) == 7


# --- the evaluation


class Ranks:
    """Stands in for three replicas: scores a sequence by its length."""

    cost_model = CostModel()

    def scores(self, plan, make) -> np.ndarray:
        found = {}
        for own, streams in zip(plan.micro_batches, plan.divided(make), strict=True):
            for part, stream in zip(own, streams, strict=True):
                found |= zip(part, stream.lengths.tolist(), strict=True)
        return np.array([found[i] for i in range(len(found))], np.float32)


@pytest.mark.parametrize("packing", ["true", "false"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_held_out_pairs_that_replicas_cannot_share_evenly(tmp_path, conversations, packing, count):
    overrides = ["model.path=m", "data.train=d.jsonl", "megatron.data_parallel=3", f"train.packing={packing}"]
    config = read_config(None, overrides, Command.reward_model)
    records = [
        {"prompt": "1+1", "chosen": "2" * (3 + number % 2), "rejected": "2" * (1 + number)}
        for number in range(count)
    ]
    held_out, _ = load(tmp_path, conversations, *[r for r in records if r["chosen"] != r["rejected"]])
    monitor = SimpleNamespace(phases=lambda name: nullcontext())
    run = SimpleNamespace(config=config, state=None, trainer=Ranks(), monitor=monitor)
    ahead = [len(pair.chosen.response_ids) - len(pair.rejected.response_ids) for pair in held_out]
    found = _Training(run, held_out, held_out).evaluate(0)
    assert found["eval/margin"] == pytest.approx(np.mean(ahead))
    assert found["eval/accuracy"] == pytest.approx(np.mean(np.array(ahead) > 0))
