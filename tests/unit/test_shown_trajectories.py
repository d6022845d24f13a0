"""Choice of the trajectories of a step for the report, and what is kept of them."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from grpo_megatron.algorithm.mismatch import WorstToken
from grpo_megatron.batch.sample import WeightSpan
from grpo_megatron.files import json_text
from grpo_megatron.monitoring.trajectories import trajectories_of, trajectory_of
from grpo_megatron.rollout import shown_trajectories
from grpo_megatron.rollout.shown_trajectories import (
    BEST,
    MISMATCH,
    WORST,
    TracedSequence,
    chosen_trajectories,
    within_limit,
)
from tests.unit.scored_groups import group
from tests.unit.shown_runs import Talk, decode

CALL = '<tool_call>\n{"name": "python", "arguments": {"code": "1<2"}}\n</tool_call>'
ASKED = "<|im_start|>system\nCount.<|im_end|>\n<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n"
ANSWER = (
    "<|im_end|>\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
)


def worst_token(trajectory_id: int, **changes) -> WorstToken:
    token = WorstToken(0.5, -1.0, -1.5, trajectory_id, 3, 5, (1, 2, 3), 4, (5,))
    return token._replace(**changes)


def test_the_best_the_worst_and_the_largest_mismatch_are_kept():
    groups = [group(1, (0.5, 0.25)), group(2, (1.0, 1.0)), group(3, (0.5, 1.0, 0.0))]
    # Of equal rewards, the one of a group that the policy learns from.
    assert chosen_trajectories(groups, []) == {31: [BEST], 32: [WORST]}
    found = chosen_trajectories(groups, [worst_token(10), worst_token(11)])
    assert found == {31: [BEST], 32: [WORST], 10: [MISMATCH]}
    assert chosen_trajectories(groups, [worst_token(31)])[31] == [BEST, MISMATCH]
    assert chosen_trajectories(groups[1:2], [worst_token(99)]) == {20: [BEST]}


def test_rewards_that_are_unknown_or_no_numbers_are_not_chosen():
    assert chosen_trajectories([], []) == {}
    assert chosen_trajectories([group(1, (math.nan, None))], []) == {}
    assert chosen_trajectories([group(1, (math.nan, 0.5, None))], []) == {11: [BEST]}


def test_a_tree_with_roles_calls_versions_and_ages():
    talk = (
        Talk(ASKED).turn(ASKED, f"Let me see. {CALL}", 3).turn(f"{ASKED}Let me see. {CALL}{ANSWER}", "5", 4)
    )
    shown = talk.shown()
    assert [(node.kind, node.roles) for node in shown.nodes] == [
        ("prompt", ["system", "user"]),
        ("written", []),
        ("read", ["user", "tool"]),
        ("written", []),
    ]
    (call,) = shown.nodes[1].calls
    assert (call.name, json.loads(call.arguments)) == ("python", {"code": "1<2"})
    assert [node.text for node in shown.nodes] == [ASKED, f"Let me see. {CALL}", ANSWER, "5"]
    assert [node.versions for node in shown.nodes] == [[], [[3, len(CALL) + 12]], [], [[4, 1]]]
    assert [node.tokens == node.trained for node in shown.nodes] == [False, True, False, True]
    assert (shown.turns, shown.paths, shown.calls, shown.versions) == (2, 1, 1, [3, 4])
    assert (shown.sample, shown.prompt, shown.answer, shown.finish_reason) == (12, 105, "5", "stop")
    assert shown.tokens == len(ASKED) + len(CALL) + 12 + len(ANSWER) + 1
    assert (shown.reward, shown.components) == (1.0, {"<b>": 1.0, "format": 0.5})


@pytest.mark.parametrize(
    ("text", "roles"),
    [
        ("<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|><|start_header_id|>assistant", ["user"]),
        ("<bos><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n", ["user"]),
        ("<|system|>\na<|user|>\nb<|assistant|>\nc<|user|>\nd", ["system", "user", "assistant", "user"]),
        ("[INST] hi [/INST]", ["user"]),
        ("<\uff5cUser\uff5c>hi<\uff5cAssistant\uff5c>", ["user"]),
        ("2+3=", []),
    ],
)
def test_roles_of_common_chat_templates(text, roles):
    assert Talk(text).turn(text, "a").shown().nodes[0].roles == roles


def test_a_call_within_the_reasoning_is_none():
    assert Talk("a").turn("a", f"<think>{CALL}").shown().calls == 0
    assert Talk("<think>").turn("<think>", CALL).shown().calls == 0
    assert Talk("a").turn("a", f"<think>x</think>{CALL}").shown().calls == 1


def test_the_tokens_that_differ_most_come_first():
    talk = Talk("ask").turn("ask", "abcdefghijklmnop", 3).turn("askx", "q", 2)
    first, second = (TracedSequence.of_sample(one, one.arrays) for one in talk.samples())
    trainer = first.engine.copy()
    trainer[[2, 4]] += [0.5, -0.125]
    traced = [replace(first, trainer=trainer), replace(second, trainer=second.engine + np.float32(math.nan))]
    painter = shown_trajectories.TreePainter(decode, 100)
    shown = painter.trajectory(replace(talk.group, samples=talk.samples()), traced, [])
    assert [(one.token, one.position, one.version, one.node) for one in shown.worst] == [
        ("q", 4, 2, 3),  # NaN is the largest difference
        ("c", 5, 3, 1),
        ("e", 7, 3, 1),
    ]
    assert (shown.worst[1].engine, shown.worst[1].trainer, shown.worst[1].difference) == (-3.0, -2.5, 0.5)
    assert (shown.worst[1].before, shown.worst[1].after) == ("askab", "defghi")
    assert shown.compared == "all"


def test_tokens_that_are_not_trained_are_not_compared():
    talk = Talk("a").turn("a", "bcd")
    (sample,) = talk.samples()
    traced = TracedSequence.of_sample(sample, sample.arrays)
    masked = replace(traced, loss_mask=np.array([True, False, True]), trainer=traced.engine + np.float32(1))
    shown = shown_trajectories.TreePainter(decode, 100).trajectory(talk.group, [masked], [])
    assert [one.token for one in shown.worst] == ["b", "d"]
    assert (shown.nodes[1].tokens, shown.nodes[1].trained, shown.trained) == (3, 2, 2)


def test_without_log_probs_of_the_trainer_the_worst_tokens_of_the_step_are_shown():
    talk = Talk("ab").turn("ab", "cde")
    token = worst_token(12, position=4, length=5, token=ord("e"))
    others = [worst_token(13), worst_token(12, length=9), worst_token(12, position=3, token=ord("x"))]
    shown = talk.shown(gap=None, worst=[token, *others])
    assert [(one.token, one.before, one.engine, one.trainer) for one in shown.worst] == [
        ("e", "abcd", -1.0, -1.5)
    ]
    assert shown.compared == "worst"
    assert talk.shown(gap=None).compared == "none"


def test_columns_of_a_batch_are_those_of_the_recording():
    """A batch has the values of a token at the position before."""
    (sample,) = Talk("ab").turn("ab", "cde").samples()
    mask, engine = np.array([0, 1, 1, 1, 0], bool), np.array([0, -1, -2, -3, 0], np.float32)
    ids = np.concatenate([sample.arrays.prompt_ids, sample.arrays.response_ids])
    columns = TracedSequence.of_columns(sample, ids, mask, engine, 2 * engine, is_known=True)
    given = TracedSequence.of_sample(sample, sample.arrays)
    for name in ("ids", "loss_mask", "engine"):
        assert np.array_equal(getattr(columns, name), getattr(given, name)), name
    assert columns.trainer.tolist() == [-2, -4, -6]
    unknown = TracedSequence.of_columns(sample, ids, mask, engine, 2 * engine, is_known=False)
    assert unknown.trainer is None


def test_spans_of_two_versions_in_a_turn():
    (sample,) = Talk("ab").turn("ab", "cde").samples()
    sample = replace(sample, weight_spans=(WeightSpan(2, 0, 2), WeightSpan(5, 2, 3)))
    traced = TracedSequence.of_sample(sample, sample.arrays)
    assert traced.versions(2, 5) == [[2, 2], [5, 1]]
    assert traced.versions(4, 5) == [[5, 1]]
    assert [traced.version(position) for position in range(1, 6)] == [None, 2, 2, 5, None]


def test_long_texts_are_cut_in_the_middle():
    shown = Talk("a" * 300).turn("a" * 300, "b" * 1000).shown(characters=200)
    assert [node.tokens for node in shown.nodes] == [300, 1000]
    assert "[... 100 characters ...]" in shown.nodes[0].text
    assert "[... 800 characters ...]" in shown.nodes[1].text


@pytest.fixture
def long_talk() -> Talk:
    talk, read = Talk("ask"), "ask"
    for number in range(300):
        text = f"{number:04}" + "x" * 996
        talk.turn(read, text)
        read += f"{text}?"
    return talk


def test_hundreds_of_turns_are_capped(long_talk):
    shown = long_talk.shown()
    assert (shown.num_nodes, len(shown.nodes), shown.turns) == (600, 200, 300)
    assert [node.number for node in shown.nodes] == [*range(100), *range(500, 600)]
    assert shown.tokens == 3 + 300 * 1000 + 299
    # All texts together stay within a limit, too.
    assert sum(len(node.text) for node in shown.nodes) < 60 * 4000
    assert len(json_text(shown.row())) < 400_000


def test_sequences_beyond_the_limit_are_not_fetched(monkeypatch):
    samples = Talk("ab").turn("ab", "cd").turn("xy", "cd").turn("ef", "gh").samples()
    monkeypatch.setattr(shown_trajectories, "MOST_TOKENS", 8)
    assert within_limit(samples) == 2
    monkeypatch.setattr(shown_trajectories, "MOST_TOKENS", 2)
    assert within_limit(samples) == 1


def test_a_row_reads_back_as_it_was():
    talk = Talk(ASKED).turn(ASKED, CALL).turn(ASKED, "no")
    shown = talk.shown(reward=None, to_sample=lambda id: id + 100)
    assert shown.sample == 112
    row = json.loads(json_text(shown.row()))
    assert row["reward"] is None
    read = trajectory_of(row)
    assert math.isnan(read.reward)
    assert replace(read, reward=1.0) == replace(shown, reward=1.0)
    damaged = [
        {"step": 1, "trajectory": {**row, "nodes": 3}},
        {"step": 1, "trajectory": {**row, "of_a_later_version": 3}},
        {"step": 1, "trajectory": {}},
        {"step": 1, "name": "samples/0", "text": "a"},
    ]
    assert [one.step for one in trajectories_of([*damaged, {"step": 2, "trajectory": row}])] == [2]
