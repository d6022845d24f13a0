"""Checkpoints: bit for bit in the same layout, equal in any other, with the state at their begin, and
never half-written.
"""

import math
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_megatron.config.schema import OptimizerConfig, Precision
from grpo_megatron.megatron.state.shards import rectangles
from grpo_megatron.model.parallel_sizes import ParallelSizes
from tests.configs import actor_config, sizes_of
from tests.models import tiny_model
from tests.parallel import checkpoints
from tests.parallel.test_invariance import TOKEN, make_batch

# The epsilon is that of the invariance suite. Adam's usual one turns rounding into full-sized updates where
# gradients vanish.
OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-3, weight_decay=0.01)
SPLIT = {"distributed_optimizer": True}
BF16 = {"precision": Precision.bf16}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp
    return {
        "dense": tiny_model(folder("dense"), "qwen3"),
        "tied": tiny_model(folder("tied"), "qwen2", tied=True),
        "experts": tiny_model(folder("experts"), "qwen3_moe"),
        "delta": tiny_model(folder("delta"), "qwen3_next"),
        "sinks": tiny_model(folder("sinks"), "gpt_oss"),
    }


@pytest.fixture(scope="module")
def saved_by():
    """{what saved: (folder, outcomes)}, shared by the layouts that load it."""
    return {}


@pytest.fixture(scope="module")
def batches():
    return [make_batch(seed) for seed in range(3)]


def loss_of(outcomes) -> float:
    """Return the loss of the step after the checkpoint. The losses of replicas add up."""
    return sum(outcome.result.metrics["actor/loss"].value for outcome in outcomes if outcome.result)


def assert_equal_states(found, expected):
    assert found.numbers == expected.numbers
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert torch.equal(found.tensors[name], tensor), name


def assert_same_contents(found, expected):
    """Check that two checkpoints have the same state. The padding of a vocabulary depends on the layout."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        common = tuple(slice(min(sizes)) for sizes in zip(found[name].shape, tensor.shape, strict=True))
        assert torch.equal(found[name][common], tensor[common]), name


SAME = {
    "dp2 distributed overlap": ("dense", ParallelSizes(dp=2), {**SPLIT, "overlap": True}),
    "dp2 distributed bf16": ("tied", ParallelSizes(dp=2), {**SPLIT, **BF16}),
    "dp2 bf16": ("dense", ParallelSizes(dp=2), BF16),
    "tp2 offloaded": ("dense", ParallelSizes(tp=2), {"optimizer": replace(OPTIMIZER, offload=True)}),
    "pp2vpp2 tied bf16": ("tied", ParallelSizes(pp=2, vpp=2), BF16),
    "cp2 distributed bf16": ("dense", ParallelSizes(cp=2), {**SPLIT, **BF16}),
    "ep2 distributed bf16": ("experts", ParallelSizes(dp=2, ep=2), {**SPLIT, **BF16}),
    "tp2 delta distributed bf16": (
        "delta",
        ParallelSizes(tp=2, dp=2, sequence_parallel=True),
        {**SPLIT, **BF16},
    ),
    "dp4 ep2 distributed": ("experts", ParallelSizes(dp=4, ep=2), SPLIT),
}


@pytest.mark.slow_when(lambda layout: layout != "ep2 distributed bf16")
@pytest.mark.parametrize("layout", SAME)
def test_a_resumed_actor_is_the_same_bit_for_bit(ranks, models, batches, tmp_path, layout):
    """Weights, masters, moments, counters and rates are compared, then the loss, the gradient norm and all
    of that after a step.
    """
    model, sizes, options = SAME[layout]
    config = actor_config(models[model], sizes, **{"optimizer": OPTIMIZER, **options})
    folder = str(tmp_path / "checkpoint")
    saved = ranks.run(checkpoints.save, sizes, config, batches, TOKEN, folder)
    resumed = ranks.run(checkpoints.resume, sizes, config, batches[-1], TOKEN, folder)
    for before, after in zip(saved, resumed, strict=True):
        assert_equal_states(after.at, before.at)
        assert_equal_states(after.after, before.after)
        # A float's text has all its bits. How much memory the process occupies is its own.
        assert str(after.result and replace(after.result, occupied=0)) == str(
            before.result and replace(before.result, occupied=0)
        )
    # All data-parallel ranks write, and none more than its part of what they share.
    written = checkpoints.bytes_of_ranks(folder)
    if sizes.dp == sizes.world_size:
        assert len(written) == sizes.world_size
        assert max(written) < 1.2 * sum(written) / len(written)


# (model, layout that saves, options), {layout that loads: options}
OTHER = {
    "dense": (
        ("dense", {"tp": 2, "dp": 2}, SPLIT),
        {"one": ({}, {}), "pp2vpp2": ({"pp": 2, "vpp": 2}, {}), "tp2pp2": ({"tp": 2, "pp": 2}, {}),
         "dp2": ({"dp": 2}, {}), "cp2 distributed": ({"cp": 2}, SPLIT)},
    ),
    "experts": (
        ("experts", {"dp": 2, "ep": 2}, SPLIT),
        {"one": ({}, {}), "tp2": ({"tp": 2, "sequence_parallel": True}, SPLIT), "pp2": ({"pp": 2}, {})},
    ),
    "delta": (
        ("delta", {"tp": 2, "dp": 2, "sequence_parallel": True}, SPLIT),
        {"one": ({}, {}), "pp2vpp2": ({"pp": 2, "vpp": 2}, {}), "ep2": ({"dp": 2, "ep": 2}, SPLIT)},
    ),
    "sinks": (
        ("sinks", {"tp": 2, "dp": 2, "sequence_parallel": True}, SPLIT),
        {"one": ({}, {}), "ep2": ({"dp": 2, "ep": 2}, SPLIT)},
    ),
    "tied bf16": (
        ("tied", {"pp": 2}, BF16),
        {"tp2dp2 distributed": ({"tp": 2, "dp": 2}, SPLIT | BF16), "one": ({}, BF16)},
    ),
}  # fmt: skip
FAST = {("experts", "tp2")}


@pytest.mark.slow_when(lambda saving, loading: (saving, loading) not in FAST)
@pytest.mark.parametrize(
    ("saving", "loading"), [(saving, loading) for saving, (_, others) in OTHER.items() for loading in others]
)
def test_a_checkpoint_loads_in_another_layout(
    ranks, models, batches, tmp_path_factory, saving, loading, saved_by
):
    """Saved again there, the checkpoint is the same tensor by tensor, and the next loss is the same."""
    (model, layout, options), others = OTHER[saving]

    def configured(layout, options):
        return actor_config(models[model], ParallelSizes(**layout), OPTIMIZER, **options)

    if saving not in saved_by:
        folder = str(tmp_path_factory.mktemp("saved"))
        outcomes = ranks.run(
            checkpoints.save, ParallelSizes(**layout), configured(layout, options), batches, TOKEN, folder
        )
        saved_by[saving] = folder, outcomes
    folder, saved = saved_by[saving]
    again = str(tmp_path_factory.mktemp("again"))
    there = configured(*others[loading])
    loaded = ranks.run(checkpoints.resume, sizes_of(there), there, batches[-1], TOKEN, folder, again)
    assert_same_contents(checkpoints.global_tensors(again), checkpoints.global_tensors(folder))
    tolerance = 1e-5 if there.megatron.precision == Precision.fp32 else 2e-2
    assert loss_of(loaded) == pytest.approx(loss_of(saved), rel=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("not_waiting", [None, "weights", "states"])
def test_a_checkpoint_is_of_the_moment_it_was_begun(ranks, models, batches, tmp_path, not_waiting):
    """The ranks use the reference, sleep and train while it is written.

    The test notices if they do not wait.
    """
    sizes, folder = ParallelSizes(dp=2), str(tmp_path / "checkpoint")
    config = actor_config(models["tied"], sizes, OPTIMIZER, with_reference=True, **SPLIT, **BF16)
    begun = ranks.run(checkpoints.save_while_training, sizes, config, batches, TOKEN, folder, not_waiting)
    resumed = ranks.run(checkpoints.resume, sizes, config, batches[1], TOKEN, folder)
    for expected, found in zip(begun, resumed, strict=True):
        if not_waiting is None:
            assert_equal_states(found.at, expected)
            continue
        later = {
            name
            for name, tensor in expected.tensors.items()
            if not torch.equal(found.at.tensors[name], tensor)
        }
        weights = {name for name in expected.tensors if name[0].isalpha()}
        assert later
        assert later <= (weights if not_waiting == "weights" else expected.tensors.keys() - weights)


@pytest.mark.slow
def test_a_disk_that_is_full_is_one_message(ranks, models, batches, tmp_path):
    sizes, folder = ParallelSizes(dp=2), tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "__1_0.distcp").symlink_to("/dev/full")
    config = actor_config(models["dense"], sizes, OPTIMIZER)
    for said in ranks.run(checkpoints.fail, sizes, config, batches, TOKEN, str(folder)):
        assert f"{folder} could not be written by rank 1: OSError: [Errno 28] No space left on device" in said
    assert not (folder / ".metadata").exists()
    assert Path(f"{folder}-next", ".metadata").exists()


@pytest.fixture
def small_disk(tmp_path):
    """A folder with room for 16 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "none", folder], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system of a few MB can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.slow
def test_a_run_goes_on_beside_a_full_disk(ranks, models, batches, small_disk):
    """It reports the full disk, keeps the earlier checkpoint, leaves nothing half-written, and saves again
    once there is room.
    """
    config = actor_config(models["dense"], ParallelSizes(), OPTIMIZER)
    ((said, state),) = ranks.run(
        checkpoints.save_to_a_full_disk, ParallelSizes(), config, batches, TOKEN, str(small_disk)
    )
    assert [line.split(":")[0] for line in (said[0], said[2])] == [
        "wrote checkpoint step_00000000",
        "wrote checkpoint step_00000002",
    ]
    assert "training continues, but" in said[1]
    assert "No space left on device" in said[1]
    assert "the newest checkpoint is step_00000000" in said[1]
    assert [path.name for path in (small_disk / "checkpoints").iterdir()] == ["step_00000002"]
    (resumed,) = ranks.run(
        checkpoints.resume,
        ParallelSizes(),
        config,
        batches[0],
        TOKEN,
        str(small_disk / "checkpoints" / "step_00000002" / "actor"),
    )
    assert_equal_states(resumed.at, state)


def test_a_checkpoint_that_does_not_fit_is_one_message(ranks, models, tmp_path):
    configs = [actor_config(models[name], ParallelSizes(), OPTIMIZER) for name in ("dense", "tied")]
    (said,) = ranks.run(checkpoints.refusals, ParallelSizes(), *configs, str(tmp_path))
    expected = (
        "so it is for a different model",
        "has only weights",
        ".metadata cannot be read",
    )
    for message, part in zip(said, expected, strict=True):
        assert part in message


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2 distributed", "tp2", "one"])
def test_a_reference_that_was_reset_is_in_the_checkpoint(ranks, models, batches, tmp_path, layout):
    """It loads in any layout, with the state at the save, although it is reset again while that is
    written.
    """
    options = {"with_reference": True, "optimizer": OPTIMIZER}
    folder, first = str(tmp_path / "checkpoint"), ParallelSizes(dp=2)
    expected = ranks.run(
        checkpoints.save_after_reset,
        first,
        actor_config(models["tied"], first, **options, **SPLIT),
        batches,
        TOKEN,
        folder,
    )
    layouts = {
        "dp2 distributed": (first, SPLIT),
        "tp2": (ParallelSizes(tp=2), {}),
        "one": (ParallelSizes(), {}),
    }
    sizes, more = layouts[layout]
    found = ranks.run(
        checkpoints.resume_after_reset,
        sizes,
        actor_config(models["tied"], sizes, **options, **more),
        batches[2],
        folder,
    )
    if sizes == first:
        for one, other in zip(found, expected, strict=True):
            assert np.array_equal(one.policy, other.policy)
            assert np.array_equal(one.reference, other.reference)
            assert not np.allclose(one.policy, one.reference, atol=1e-6)
        return
    # Replicas divide the tokens; their sums are the same. All ranks of a replica have the same values.
    for name in ("policy", "reference"):
        sums = [
            sum(getattr(rank, name).sum() for rank in all_ranks)
            for all_ranks in (found[:: sizes.tp], expected)
        ]
        assert sums[0] == pytest.approx(sums[1], rel=1e-5)


def test_a_rank_goes_on_with_its_random_numbers(ranks, models, tmp_path):
    sizes, folder = ParallelSizes(dp=2), str(tmp_path / "checkpoint")
    config = actor_config(models["dense"], sizes, OPTIMIZER)
    saved = ranks.run(checkpoints.random_numbers, sizes, config, folder, False)
    assert ranks.run(checkpoints.random_numbers, sizes, config, folder, True) == saved
    assert (
        ranks.run(checkpoints.random_numbers, sizes, config, str(tmp_path / "another"), False, seed=7)
        != saved
    )


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_a_flat_range_is_few_rectangles(shape, data):
    count = math.prod(shape)
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    numbers = np.arange(count).reshape(shape)
    found = list(rectangles(start, stop, tuple(shape)))
    parts = [numbers[tuple(slice(a, a + n) for a, n in zip(*rectangle, strict=True))] for rectangle in found]
    assert [number for part in parts for number in part.flatten()] == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)
