"""A trajectory's tree: whatever the model reads, each turn is trained once, after what was read for it."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import WeightSpan
from grpo_megatron.rollout.trajectory import Episode, Trajectory
from grpo_megatron.sglang.request import Completion

PROMPT = [1, 2]
tokens = st.lists(st.integers(1, 3), max_size=3)


def completion(trajectory: Trajectory, ids: list[int], number: int) -> Completion:
    """Return a turn whose log-probs, version and experts tell its number."""
    rows = np.arange(trajectory.routed, len(trajectory.ids) + len(ids) - 1)
    return Completion(
        (0, 0),
        np.array(ids, np.int32),
        -np.arange(len(ids), dtype=np.float32) - 10.0 * number,
        "stop",
        (WeightSpan(number, 0, len(ids)),),
        np.stack([np.full_like(rows, number), rows], axis=1).astype(np.int16)[:, None],
    )


@given(st.data())
def test_each_turn_is_trained_once_after_what_the_model_read_for_it(data):
    trajectory = Trajectory(Episode(Prompt(0, np.array(PROMPT), "", ""), 3, 7, 1000, (0, 0)))
    inputs, wanted = [PROMPT], []
    for number in range(data.draw(st.integers(1, 6))):
        # Most inputs go on after an earlier one or after its turn. Some have nothing in common with others.
        start = data.draw(st.sampled_from([*inputs, []]))
        read = [*start, *data.draw(tokens)] or [3]
        own = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
        assert trajectory.read(read)
        assert trajectory.ids == read
        turn = completion(trajectory, own, number)
        trajectory.write(turn)
        assert trajectory.ids == read + own
        inputs += [read, read + own]
        wanted += [(read + own[:i], own[i], turn.logprobs[i], number) for i in range(len(own))]
    found = []
    for sample in trajectory.samples("stop"):
        arrays = sample.arrays
        ids, start = [*arrays.prompt_ids.tolist(), *arrays.response_ids.tolist()], len(arrays.prompt_ids)
        version = {
            place: span.version for span in sample.weight_spans for place in range(span.start, span.end)
        }
        assert sorted(version) == np.flatnonzero(arrays.loss_mask).tolist()
        assert arrays.loss_mask[-1]
        assert not arrays.rollout_logprobs[~arrays.loss_mask].any()
        for place in version:
            found.append(
                (ids[: start + place], ids[start + place], arrays.rollout_logprobs[place], version[place])
            )
        # The experts of each token are those of the first request of the path that computed it.
        assert arrays.routing[:-1, 0, 1].tolist() == list(range(len(ids) - 1))
    assert sorted(found, key=lambda one: one[3]) == wanted


def test_paths_share_what_they_have_in_common():
    """The third turn goes on after the first one, beside the second."""
    trajectory = Trajectory(Episode(Prompt(0, np.array(PROMPT), "", ""), 3, 7, 1000, (0, 0)))
    trajectory.write(completion(trajectory, [5, 6], 0))
    for number, observation in enumerate(([7], [8]), start=1):
        assert trajectory.read([*PROMPT, 5, 6, *observation])
        assert trajectory.routed == 3  # the engine need not report them again
        trajectory.write(completion(trajectory, [9], number))
    first, second = trajectory.samples("stop")
    assert first.arrays.prompt_ids.tolist() == PROMPT
    assert first.arrays.response_ids.tolist() == [5, 6, 7, 9]
    assert first.arrays.loss_mask.tolist() == [True, True, False, True]
    assert (first.turns, second.turns) == (2, 1)
    assert second.arrays.prompt_ids.tolist() == [*PROMPT, 5, 6, 8]
    assert second.arrays.response_ids.tolist() == [9]
    assert second.arrays.routing[:-1, 0, 0].tolist() == [0, 0, 0, 2, 2]
