"""The tree of a trajectory's sequences has every token once, and every sequence as a path."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from grpo_megatron.batch import path_tree as module
from grpo_megatron.batch.path_tree import Listed, TokenPath, path_tree
from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Sample
from grpo_megatron.rollout.shown_trajectories import TracedSequence
from grpo_megatron.rollout.trajectory import Episode, Trajectory
from tests.unit.shown_runs import Talk
from tests.unit.test_trajectory_tree import PROMPT, completion, tokens


def paths_of(samples: tuple[Sample, ...]) -> list[TokenPath]:
    return [TracedSequence.of_sample(sample, sample.arrays).path for sample in samples]


def texts(listed: list[Listed], paths: list[TokenPath]) -> list[str]:
    """Return the text of each node, with the number of its parent, and `>` before a turn of the model."""
    return [
        f"{'' if one.parent is None else one.parent}{'>' if one.node.is_written else ':'}"
        + "".join(map(chr, paths[one.node.path].ids[one.node.start : one.node.end]))
        for one in listed
    ]


def tree(talk: Talk) -> list[str]:
    paths = paths_of(talk.samples())
    return texts(path_tree(paths), paths)


def test_turns_and_texts_between_them_are_nodes():
    talk = Talk("ab").turn("ab", "CD").turn("abCDef", "G")
    assert tree(talk) == [":ab", "0>CD", "1:ef", "2>G"]


def test_a_shared_beginning_is_there_once():
    talk = Talk("ab").turn("abx", "CD").turn("abxCDe", "G").turn("abxCDf", "H").turn("q", "I")
    assert tree(talk) == [":ab", "0:x", "1>CD", "2:e", "3>G", "2:f", "5>H", ":q", "7>I"]
    paths = paths_of(talk.samples())
    assert [one.depth for one in path_tree(paths)] == [1, 1, 1, 2, 2, 2, 2, 1, 1]


def test_long_texts_that_were_read_are_split_where_they_differ():
    same = 70 * "-"
    talk = Talk(f"{same}ab").turn(f"{same}ab", "C").turn(f"{same}xy", "D").turn(f"{same}xz", "E")
    assert tree(talk) == [f":{same}", "0:ab", "1>C", "0:xy", "3>D", "0:xz", "5>E"]
    short = 60 * "-"
    talk = Talk(f"{short}ab").turn(f"{short}ab", "C").turn(f"{short}xy", "D")
    assert tree(talk) == [f":{short}ab", "0>C", f":{short}xy", "2>D"]


def test_turns_are_never_split():
    same = 70 * "-"
    talk = Talk("a").turn("a", f"{same}C").turn("a", f"{same}D")
    assert tree(talk) == [":a", f"0>{same}C", f"0>{same}D"]
    # The second time, the model only reads what it wrote before, in another form.
    talk = Talk("a").turn("a", f"{same}C").turn(f"a{same}q", "D")
    assert tree(talk) == [":a", f"0>{same}C", f"0:{same}q", "2>D"]


@given(st.data(), st.sampled_from([1, 2, 64]))
def test_every_token_is_there_once_and_every_sequence_is_a_path(data, least):
    trajectory = Trajectory(Episode(Prompt(0, np.array(PROMPT), "", ""), 3, 7, 1000, (0, 0)))
    inputs = [PROMPT]
    for number in range(data.draw(st.integers(1, 6))):
        start = data.draw(st.sampled_from([*inputs, []]))
        read = [*start, *data.draw(tokens)] or [3]
        trajectory.read(read)
        turn = completion(trajectory, data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)), number)
        trajectory.write(turn)
        inputs += [read, [*read, *turn.response_ids.tolist()]]
    samples = trajectory.samples("stop")
    paths, before = paths_of(samples), module._LEAST_SHARED
    module._LEAST_SHARED = least
    try:
        listed = path_tree(paths)
    finally:
        module._LEAST_SHARED = before
    whole: list[list[int]] = []
    for one in listed:
        node, path = one.node, paths[one.node.path]
        own = path.ids[node.start : node.end].tolist()
        assert own
        assert (path.written[node.start : node.end] == node.is_written).all()
        whole.append([*(whole[one.parent] if one.parent is not None else []), *own])
        assert len(whole[-1]) == node.end
        assert whole[-1] == path.ids[: node.end].tolist()
    for path in paths:
        assert path.ids.tolist() in whole
    written = [one.node for one in listed if one.node.is_written]
    assert sum(node.end - node.start for node in written) == sum(sample.num_trained for sample in samples)
    assert {one.node.path for one in listed} == set(range(len(paths)))
