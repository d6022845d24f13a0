"""The driver's side of checkpoints: what has a final name is whole, at any moment."""

import json
from pathlib import Path

import pytest

from grpo_megatron.errors import UserError
from grpo_megatron.run.checkpoints import Checkpoints, SaveReport, read_state


class SlowTrainer:
    """Its checkpoint is a file with the number of its steps, which is there when it is finished; full: then it fails."""

    def __init__(self):
        self.steps, self.written, self.full = 0, False, False

    def begin_checkpoint(self, folder: str) -> None:
        Path(folder).mkdir()
        self._file, self._value, self.written = Path(folder, "value"), str(self.steps), False

    def checkpoint_written(self) -> bool:
        return self.written

    def finish_checkpoint(self, timeout: float | None = None) -> SaveReport:
        if self.full:
            raise UserError("no space left")
        self._file.write_text(self._value)
        return SaveReport(1.0, 0.1, 1)


@pytest.fixture
def trainer():
    return SlowTrainer()


@pytest.fixture
def saver(trainer, tmp_path):
    return Checkpoints(str(tmp_path / "checkpoints"), 2, trainer, print)


def contents(saver) -> dict[str, str]:
    """{folder: the value of the trainer in it}; of those with a final name, which must be whole."""
    found = {}
    for folder in saver.folder.iterdir():
        if folder.name.endswith(".partial"):
            with pytest.raises(UserError, match="not a whole checkpoint"):
                read_state(str(folder), "sft")
        else:
            assert read_state(str(folder), "sft")["step"] == int(folder.name.split("_")[1])
            found[folder.name] = (folder / "actor" / "value").read_text()
    return found


def run_step(saver, trainer, step):
    trainer.steps = step
    saver.after_step(step, lambda: {"step": step, "order": {}})


def test_a_checkpoint_appears_when_the_ranks_have_written_it(saver, trainer, capsys):
    run_step(saver, trainer, 1)
    assert not saver.folder.exists()
    run_step(saver, trainer, 2)
    run_step(saver, trainer, 3)
    assert contents(saver) == {}
    trainer.written = True
    run_step(saver, trainer, 3)
    assert contents(saver) == {"step_00000002": "2"}
    assert "checkpoint step_00000002: " in capsys.readouterr().out
    run_step(saver, trainer, 4)
    run_step(saver, trainer, 6)  # waits for that of step 4
    assert contents(saver) == {"step_00000002": "2", "step_00000004": "4"}
    saver.finish()
    saver.finish()
    assert [folder.name for folder in sorted(saver.folder.iterdir())] == [f"step_0000000{step}" for step in (2, 4, 6)]


def test_one_that_is_saved_again_stays_until_its_successor_is_whole(saver, trainer):
    saver.save(2, {"step": 2, "order": {}})
    saver.finish()
    trainer.steps = 22
    saver.save(2, {"step": 2, "order": {}})
    assert contents(saver) == {"step_00000002": "0"}
    saver.finish()
    assert contents(saver) == {"step_00000002": "22"}
    assert len(list(saver.folder.iterdir())) == 1


def test_one_that_failed_leaves_the_earlier_ones(saver, trainer):
    run_step(saver, trainer, 2)
    saver.finish()
    trainer.full = True
    saver.save(2, {"step": 2, "order": {}})
    with pytest.raises(UserError, match="no space left"):
        saver.finish()
    assert contents(saver) == {"step_00000002": "2"}
    trainer.full = False
    trainer.steps = 5
    saver.save(2, {"step": 2, "order": {}})  # what the failed one left is no hindrance
    saver.finish()
    assert contents(saver) == {"step_00000002": "5"}


def test_the_state_is_that_of_the_moment(saver):
    state = {"step": 2, "order": {"taken": 1}}
    saver.save(2, state)
    state["order"]["taken"] = 7
    saver.finish()
    assert json.loads((saver.folder / "step_00000002" / "state.json").read_text())["order"] == {"taken": 1}


def test_without_background_it_is_there_at_once(trainer, tmp_path):
    saver = Checkpoints(str(tmp_path), 1, trainer, print, background=False)
    run_step(saver, trainer, 1)
    assert contents(saver) == {"step_00000001": "1"}
