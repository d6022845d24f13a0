"""The file of the ledger: it survives a kill at any byte, and damage is never taken for the end."""

import json

import numpy as np
import pytest

from grpo_megatron.errors import UserError
from grpo_megatron.samples.blocks import LEDGER, DamagedLedger, LedgerFile, read_blocks
from grpo_megatron.samples.entries import ENTRY, SampleState
from tests.tools import no_file_beyond
from tests.unit.ledger_steps import ledger_of


def entries(*samples: int, **columns) -> np.ndarray:
    found = np.zeros(len(samples), ENTRY)
    found["sample"], found["state"] = samples, SampleState.admitted
    for name, value in columns.items():
        found[name] = value
    return found


def contents(path) -> list[tuple[int, list[str], list]]:
    return [(block.attempt, block.names, block.entries.tolist()) for block in read_blocks(path)]


WRITTEN = [
    (1, ["a filter", "Größe\nin two lines"], entries(2**62, -1, step=2**32 - 1, prompt=7, member=3)),
    (1, [], entries()),
    (2, ["b"], entries(5, tokens=11, oldest=-1, newest=9, optimizer_step=2, updates=1, value=0.1, name=3)),
]


@pytest.fixture
def path(tmp_path):
    file = LedgerFile(tmp_path / LEDGER)
    for block in WRITTEN:
        file.append(*block)
    assert file.end == file.path.stat().st_size
    return file.path


def test_what_is_written_is_read(path):
    assert ENTRY.itemsize == 48
    found = contents(path)
    assert [block[0] for block in found] == [1, 1, 2]
    assert [block[1] for block in found] == [["a filter", "Größe in two lines"], [], ["b"]]
    assert [block[2] for block in found] == [block[2].tolist() for block in WRITTEN]
    # Another program finds out what the file is from its first line.
    assert json.loads(path.read_bytes().splitlines()[0]) == {"format": "grpo_megatron.ledger", "version": 1}


def test_reading_from_a_later_block(path):
    blocks = list(read_blocks(path))
    assert [block.start for block in read_blocks(path, blocks[1].start)] == [
        block.start for block in blocks[1:]
    ]
    assert list(read_blocks(path, blocks[-1].end)) == []


def test_an_end_torn_at_any_byte_is_cut_off_and_the_ledger_goes_on(path):
    whole, kept = path.read_bytes(), contents(path)[:-1]
    last = list(read_blocks(path))[-1]
    for size in range(last.start, last.end):
        path.write_bytes(whole[:size])
        assert contents(path) == kept
        LedgerFile(path, 0, last.start).append(2, [], entries(8))
        assert contents(path) == [*kept, (2, [], entries(8).tolist())]


@pytest.mark.parametrize("rest", [b"\0", 100 * b"\0", 5000 * b"\xff", b"\xf7LB\n" * 9])
def test_what_the_loss_of_a_node_leaves_behind_the_end_is_not_read(path, rest):
    whole, blocks = path.read_bytes(), contents(path)
    path.write_bytes(whole + rest)
    assert contents(path) == blocks
    last = list(read_blocks(path))[-1]
    path.write_bytes(whole[: last.start + 30] + b"\0" * (last.end - last.start - 30) + rest)
    assert contents(path) == blocks[:-1]


@pytest.mark.parametrize("size", range(5))
def test_a_torn_first_line_is_an_empty_ledger(path, size):
    path.write_bytes(path.read_bytes()[:size])
    assert contents(path) == []


def test_damage_at_any_byte_before_the_last_block_is_refused_with_its_place(path):
    whole, blocks = path.read_bytes(), list(read_blocks(path))
    for block in blocks[:-1]:
        for place in range(block.start, block.end):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
            with pytest.raises(DamagedLedger, match=f"{path} is damaged at byte {block.start}: .* restore"):
                contents(path)


def test_a_missing_piece_is_damage(path):
    whole, blocks = path.read_bytes(), list(read_blocks(path))
    path.write_bytes(whole[: blocks[0].end - 48] + whole[blocks[0].end :])
    with pytest.raises(DamagedLedger):
        contents(path)


def test_another_file_is_refused(tmp_path):
    (tmp_path / LEDGER).write_text('{"step": 1, "prompts": [4, 2]}\n')
    with pytest.raises(UserError, match="is not a ledger that this version can read"):
        contents(tmp_path / LEDGER)
    with pytest.raises(UserError, match="does not exist"):
        contents(tmp_path / "none")


def test_blocks_that_a_full_disk_refused_are_written_later(path, capsys):
    before = contents(path)
    last = list(read_blocks(path))[-1]
    file = LedgerFile(path, last.start, last.end)
    with no_file_beyond(path.stat().st_size + 10):
        file.append(2, ["c"], entries(1))
        file.append(2, [], entries(2))
        assert file.flush().strerror == "File too large"
    assert contents(path) == before
    assert capsys.readouterr().out.count("could not be written (File too large); the entries are kept") == 1
    file.append(2, [], entries(3))
    assert contents(path) == [
        *before,
        *((2, names, entries(n).tolist()) for n, names in ((1, ["c"]), (2, []), (3, []))),
    ]
    assert file.end == path.stat().st_size
    assert list(read_blocks(path))[-1].start == file.last


def test_a_checkpoint_brings_what_waits_to_the_disk_first(tmp_path):
    ledger = ledger_of(tmp_path, 1)
    size = (tmp_path / LEDGER).stat().st_size
    with no_file_beyond(size):
        from tests.unit.ledger_steps import group, train

        train(ledger, 2, [group(4)])
    assert (tmp_path / LEDGER).stat().st_size == size
    assert ledger.state_dict()["end"] == (tmp_path / LEDGER).stat().st_size > size
