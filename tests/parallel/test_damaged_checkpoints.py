"""Checkpoints with hundreds of kinds of damage.

The driver or the ranks notice each before anything is loaded.
"""

import random
import re
import shutil
from pathlib import Path

import pytest

from grpo_megatron.config.command import Command
from grpo_megatron.errors import UserError
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.run.resume import newest_checkpoint, open_checkpoint
from tests.configs import actor_config
from tests.messages import logged
from tests.models import tiny_model
from tests.parallel import checkpoints
from tests.parallel.test_checkpoint import OPTIMIZER
from tests.parallel.test_invariance import TOKEN, make_batch

PER_BATCH = 50
TWO = ParallelSizes(dp=2)


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """A run's folder with three checkpoints of one rank."""
    root = tmp_path_factory.mktemp("saved")
    config = actor_config(tiny_model(tmp_path_factory.mktemp("model"), "qwen3"), ParallelSizes(), OPTIMIZER)
    ranks.run(
        checkpoints.save_as_a_run,
        ParallelSizes(),
        config,
        [make_batch(seed) for seed in range(3)],
        TOKEN,
        str(root),
    )
    return root


def _truncate(draw, path: Path, other: Path) -> None:
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])


def _flip(draw, path: Path, other: Path) -> None:
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def _zero(draw, path: Path, other: Path) -> None:
    """Zero a block, as if the disk had lost it."""
    content = bytearray(path.read_bytes())
    first = draw.randrange(len(content))
    content[first : first + 512] = bytes(len(content[first : first + 512]))
    path.write_bytes(content)


def _append(draw, path: Path, other: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def _remove(draw, path: Path, other: Path) -> None:
    path.unlink()


def _another(draw, path: Path, other: Path) -> None:
    """Replace the file by the same file of another checkpoint, whose size is the same or nearly so."""
    shutil.copy(other, path)


DAMAGES = [_truncate, _flip, _zero, _append, _remove, _another]


def damaged(saved: Path, root: Path, seed: int) -> tuple[Path, str] | None:
    """Copy the newest checkpoint with one damaged file.

    Return (its folder, the damage), or None if nothing changed.
    """
    draw = random.Random(seed)
    for folder in saved.iterdir():
        (root / folder.name).symlink_to(folder)
    newest, other = root / "step_00000002", saved / "step_00000001"
    newest.unlink()
    shutil.copytree(saved / newest.name, newest)
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    path, damage = draw.choice(files), draw.choice(DAMAGES)
    before = path.read_bytes()
    name = path.relative_to(newest)
    damage(draw, path, other / name)
    changed = not path.exists() or path.read_bytes() != before
    return (newest, f"seed {seed}: {name} {damage.__name__}") if changed else None


@pytest.mark.parametrize(
    "batch", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, 4))]
)
def test_damage_is_noticed_before_anything_is_loaded(ranks, saved, tmp_path, batch):
    by_driver, for_ranks = 0, []
    for seed in range(batch * PER_BATCH, (batch + 1) * PER_BATCH):
        (tmp_path / str(seed)).mkdir()
        found = damaged(saved, tmp_path / str(seed), seed)
        if found is None:
            continue
        newest, how = found
        with logged() as said:
            begun = newest_checkpoint(newest.parent, Command.sft)
        if begun.step == 2:
            for_ranks.append((begun, how))
            continue
        by_driver += 1
        assert begun.step == 1, how
        assert str(newest) in said[0], how
        with pytest.raises(UserError, match=re.escape(str(newest))):
            open_checkpoint(newest, Command.sft)
    sound = open_checkpoint(saved / "step_00000002", Command.sft)
    folders = [(begun.actor, begun.files) for begun in (sound, *(begun for begun, _ in for_ranks))]
    for each in ranks.run(
        checkpoints.damages, TWO, folders
    ):  # all ranks say the same, whoever has read the file
        assert each[0] == ""
        for (begun, how), said in zip(for_ranks, each[1:], strict=True):
            assert "does not match its digest" in said, how
            assert begun.actor in said, how
    assert by_driver > PER_BATCH / 4
    assert len(for_ranks) > PER_BATCH / 10


@pytest.mark.slow
def test_what_is_not_verified_would_be_loaded(ranks, saved, tmp_path):
    """Only the digests reveal this fault: no reader notices a flipped bit of a weight."""
    folder = tmp_path / "step_00000002"
    shutil.copytree(saved / folder.name, folder)
    shard = folder / "actor" / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    whole, other = (
        checkpoints.global_tensors(str(root / folder.name / "actor")) for root in (saved, tmp_path)
    )
    assert [name for name in whole if not whole[name].equal(other[name])]
