"""Recordings of rollouts: what is written, read again, kept, moved and refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from grpo_megatron.batch.arrays import read, reading_forbidden
from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Group, Sample
from grpo_megatron.cli import main
from grpo_megatron.errors import UserError
from grpo_megatron.preflight.check import check
from grpo_megatron.rollout.manager import RolloutManager
from grpo_megatron.rollout.recording import arrays
from grpo_megatron.rollout.recording.arrays import RecordedArrays
from grpo_megatron.rollout.recording.record import Recorder
from grpo_megatron.rollout.recording.replay import Replay
from tests.models import random_samples
from tests.rollouts import LocalSampler, recorder_of
from tests.tools import no_file_beyond

# Two steps as an earlier version wrote them, with all that a sample can have.
OLD = Path(__file__).parent / "data" / "recording_version_1.jsonl"


def groups_of(step: int) -> list[Group]:
    """Return two groups of two samples."""
    samples, groups = random_samples(count=4), []
    for number in range(2):
        chosen = samples[2 * number : 2 * number + 2]
        prompt = Prompt(number, chosen[0].arrays.prompt_ids, "text", "answer", {"a": [1]})
        groups.append(Group(number, prompt, tuple(s.scored(0.1 * step, {"part": 1.0}) for s in chosen)))
    return groups


@pytest.fixture
def path(tmp_path):
    """A recording of the steps 1 and 2."""
    recorder = recorder_of(tmp_path / "r")
    for step in (1, 2):
        recorder.write(step, groups_of(step))
    return tmp_path / "r"


def samples_of(groups: list[Group]) -> list[Sample]:
    return [sample for group in groups for sample in group.samples]


def must_be_equal(ours: list[Group], original: list[Group]) -> None:
    for one, other in zip(samples_of(ours), samples_of(original), strict=True):
        assert replace(one, handle=None, texts=None) == replace(other, handle=None, texts=None)
        assert (one.response_text, one.scored_text) == (other.response_text, other.scored_text)
        for name, array in vars(other.arrays).items():
            assert np.array_equal(getattr(one.arrays, name), array), name
        for name in ("prompt_ids", "response_ids", "loss_mask", "rollout_logprobs"):
            assert getattr(one.arrays, name).dtype == getattr(other.arrays, name).dtype, name
    for one, other in zip(ours, original, strict=True):
        assert (one.group_id, one.failed) == (other.group_id, other.failed)
        assert replace(one.prompt, ids=None) == replace(other.prompt, ids=None)
        assert np.array_equal(one.prompt.ids, other.prompt.ids)


def names_in(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir())


FILES = [
    "recording.json",
    "step_00000001.json",
    "step_00000001_worker0.safetensors",
    "step_00000002.json",
    "step_00000002_worker0.safetensors",
]


def test_a_recording_reads_back_exactly(path):
    assert names_in(path) == FILES
    assert Replay(str(path)).steps == [1, 2]
    for step in (1, 2):
        must_be_equal(Replay(str(path)).read(step), groups_of(step))


def test_the_driver_of_a_replay_reads_no_arrays(path, monkeypatch):
    monkeypatch.chdir(path.parent)
    with reading_forbidden():
        samples = samples_of(Replay(path.name).read(1))
        with pytest.raises(RuntimeError, match="must not read the arrays"):
            read([sample.handle for sample in samples])
    monkeypatch.chdir("/")  # as a rank with another working directory
    assert samples[0].arrays.response_ids.tolist() == random_samples(count=4)[0].arrays.response_ids.tolist()


def test_a_file_is_opened_once_for_all_of_its_samples(path, monkeypatch):
    opened, usual = [], arrays.safe_open
    monkeypatch.setattr(arrays, "safe_open", lambda file, kind: opened.append(file) or usual(file, kind))
    samples = samples_of(Replay(str(path)).read(2)) + samples_of(Replay(str(path)).read(1))
    found = read([sample.handle for sample in samples[::-1]])
    assert len(opened) == 2
    for sample, own in zip(samples[::-1], found, strict=True):
        assert (len(own.prompt_ids), len(own.response_ids)) == (sample.num_prompt, sample.num_response)


@pytest.mark.parametrize(
    ("experts", "dtype"), [(255, np.uint8), (256, np.int16), (32767, np.int16), (32768, np.int32)]
)
def test_experts_take_the_smallest_integers(tmp_path, experts, dtype):
    (group,) = groups_of(1)[:1]
    draw = np.random.default_rng(0)
    routing = [draw.integers(0, experts, (sample.num_tokens, 3, 2)) for sample in group.samples]
    routing[0][0, 0, 0] = experts
    group = replace(
        group,
        samples=tuple(s.with_arrays(routing=r) for s, r in zip(group.samples, routing, strict=True)),
    )
    recorder_of(tmp_path / "r").write(1, [group])
    replayed = Replay(str(tmp_path / "r")).read(1)
    must_be_equal(replayed, [group])
    assert {sample.arrays.routing.dtype for sample in samples_of(replayed)} == {np.dtype(dtype)}


def test_each_sampler_writes_the_samples_that_it_made(tmp_path):
    """The engines 0 and 2 are on one node."""
    one, other = (LocalSampler({}, None, frozenset()) for _ in range(2))
    groups = [replace(group, engine=engine) for engine, group in zip((2, 1, 0), groups_of(1) * 2)]
    Recorder(str(tmp_path / "r"), RolloutManager(None, [one, other, one])).write(1, groups)
    replayed = Replay(str(tmp_path / "r")).read(1)
    must_be_equal(replayed, groups)
    files = [{Path(sample.handle.file).name for sample in group.samples} for group in replayed]
    first, second = (f"step_00000001_worker{number}.safetensors" for number in range(2))
    assert files == [{first}, {second}, {first}]


def test_recordings_that_cannot_be_used(path, tmp_path):
    with pytest.raises(UserError, match=r"contains 2 steps, but not step 3; lower run.total_steps"):
        Replay(str(path)).read(3)
    (tmp_path / "x.jsonl").write_text('{"prompt": 1}\n')
    (tmp_path / "empty").mkdir()
    shutil.copytree(path, tmp_path / "newer")
    (tmp_path / "newer" / "recording.json").write_text('{"format": "grpo_megatron.rollout", "version": 3}')
    for name in ("x.jsonl", "empty", "newer"):
        with pytest.raises(UserError, match=f"/{name} is not a recording that this version can read"):
            Replay(str(tmp_path / name))
    for text, complaint in (
        ('{"step": 1, "groups": [}]}', "is not valid JSON"),
        ('{"step": 1, "groups": [{}]}', "step 1 is damaged"),
        ('{"step": 1}', "step 1 is damaged"),
    ):
        (path / FILES[1]).write_text(text)
        with pytest.raises(UserError, match=complaint):
            Replay(str(path)).read(1)


def test_a_recording_that_was_copied_in_part_is_noticed_at_the_start(path):
    (path / FILES[4]).unlink()
    with pytest.raises(UserError, match="lacks the tokens of step 2; copy the recording again"):
        Replay(str(path))


@pytest.mark.parametrize("is_old", [False, True])
def test_a_check_of_the_configuration_opens_the_recording(path, is_old):
    place = OLD if is_old else path

    def report():
        return check(None, ["model.path=m", f"rollout.replay={place}"])

    assert f"rollout.replay {place}" in report().checked
    (path / FILES[4]).unlink()
    assert report().violations == (
        [] if is_old else [f"rollout.replay: {path} lacks the tokens of step 2; copy the recording again"]
    )


def test_arrays_that_cannot_be_used(path):
    sample = samples_of(Replay(str(path)).read(1))[1]
    whole, file = (path / FILES[2]).read_bytes(), path / FILES[2]

    def must_be_refused(because: str) -> None:
        with pytest.raises(UserError, match=rf"{FILES[2]} is missing or damaged on .* \(.*{because}"):
            read([sample.handle])

    file.unlink()
    must_be_refused("No such file")
    for size in (0, 100, len(whole) - 1):
        file.write_bytes(whole[:size])
        must_be_refused("")
    file.write_bytes(whole)
    columns = load_file(file)
    for name in ("prompt_ids", "response_ids", "loss_mask", "rollout_logprobs"):
        save_file(columns | {name: columns[name][:-1]}, file)
        must_be_refused(f"{name} has .* rows, which `lengths` contradicts")
        save_file({key: value for key, value in columns.items() if key != name}, file)
        must_be_refused("")
    save_file(columns | {"lengths": -columns["lengths"]}, file)
    must_be_refused("contradicts")
    save_file(columns, file)
    with pytest.raises(UserError, match="is missing or damaged"):
        read([RecordedArrays(str(file), 4)])


def test_a_resumed_recording_keeps_the_steps_before(path):
    for resumed, kept in ((9, FILES), (2, FILES), (1, FILES[:3])):
        (path / "step_00000007_worker1.safetensors").write_text("half")  # a killed run leaves these
        (path / "step_00000007.json.tmp").write_text("half")
        (path / "step_00000001.json.tmp").write_text("half")
        (path / "notes.txt").write_text("the user's")
        recorder = recorder_of(path, resumed)
        assert names_in(path) == sorted([*kept, "notes.txt"])
    must_be_equal(Replay(str(path)).read(1), groups_of(1))
    recorder.write(2, groups_of(1))
    assert (
        Replay(str(path)).read(2)[0].samples[0].reward == 0.1
    )  # step 2 anew, now with the rewards of step 1


def test_a_step_counts_when_its_rows_are_there(path):
    (path / FILES[3]).unlink()
    with pytest.raises(UserError, match="contains 1 steps, but not step 2"):
        Replay(str(path)).read(2)


def test_a_new_run_moves_an_earlier_recording(path, capsys):
    """The recording may be one that `rollout.replay` was meant for."""
    for number in (1, 2):
        recorder_of(path)
        assert names_in(path.with_name(f"r.{number}")) == FILES
        assert capsys.readouterr().out == f"moved the earlier recording {path} to {path}.{number}\n"
        recorder_of(path)  # what has no step yet stays where it is
        assert names_in(path) == FILES[:1]
        shutil.rmtree(path)
        shutil.copytree(f"{path}.{number}", path)


@pytest.mark.parametrize("resumed", [0, 1])
def test_a_recording_of_an_earlier_version_is_moved_too(tmp_path, resumed):
    shutil.copy(OLD, tmp_path / "r")
    recorder_of(tmp_path / "r", resumed).write(2, groups_of(2))
    assert Replay(str(tmp_path / "r")).steps == [2]
    assert (tmp_path / "r.1").read_bytes() == OLD.read_bytes()


@pytest.mark.parametrize("resumed", [0, 1])
def test_what_is_no_recording_is_not_overwritten(tmp_path, resumed):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": 1}\n')
    (tmp_path / "data").mkdir()
    shutil.copy(OLD, tmp_path / "data" / "step_00000005.json")
    for name in ("prompts.jsonl", "data"):
        with pytest.raises(UserError, match=rf"^rollout.record: .*{name} is not a recording; move it away"):
            recorder_of(tmp_path / name, resumed)
    assert (tmp_path / "prompts.jsonl").read_text() == '{"prompt": 1}\n'
    assert names_in(tmp_path / "data") == ["step_00000005.json"]


@pytest.mark.parametrize("what", ["arrays", "rows"])
def test_a_step_that_has_no_room_is_left_out_of_a_recording(path, what, capsys):
    recorder, size = recorder_of(path, resumed=2), (path / FILES[2]).stat().st_size
    assert size < (path / FILES[1]).stat().st_size  # so that the rows do not fit where the arrays do
    with no_file_beyond(size - 10 if what == "arrays" else size + 10):
        recorder.write(3, groups_of(3))
    assert names_in(path) == FILES
    assert (
        f"{path} could not be written (File too large); step 3 is missing from the recording, and the run "
        "continues" in capsys.readouterr().out
    )
    recorder.write(4, groups_of(4))
    assert Replay(str(path)).steps == [1, 2, 4]


def test_a_folder_that_is_gone_ends_no_run(path, capsys):
    recorder = recorder_of(path, resumed=2)
    path.rename(path.with_name("elsewhere"))
    path.write_text("a file")
    recorder.write(3, groups_of(3))
    assert "step 3 is missing from the recording" in capsys.readouterr().out
    assert path.read_text() == "a file"


def test_a_disk_that_nodes_do_not_share_is_noticed(tmp_path):
    class Elsewhere(LocalSampler):
        """Writes to a disk of another node."""

        async def write_samples(self, path, handles):
            return None

    recorder = Recorder(str(tmp_path / "r"), RolloutManager(None, [Elsewhere({}, None, frozenset())]))
    with pytest.raises(UserError, match=r"worker0\.safetensors, which does not exist on this node; choose a"):
        recorder.write(1, groups_of(1))
    assert Replay(str(tmp_path / "r")).steps == []


# --- recordings of earlier versions


def test_an_old_recording_has_the_same_values():
    replay = Replay(str(OLD))
    assert replay.steps == [1, 3]
    (group,) = replay.read(3)
    assert (group.group_id, group.failed, group.prompt.uid, group.prompt.ids.tolist()) == (3, 1, 7, [5, 6])
    assert group.prompt.messages == [{"role": "user", "content": "2+3?"}]
    one, other = group.samples
    assert (one.num_prompt, one.num_response, one.num_trained) == (2, 3, 2)
    assert (one.response_text, one.reward, one.weight_spans[0].version) == ("5 é", 0.1, 2)
    assert (other.turns, other.scored_text, other.trajectory_id) == (2, "é", 7)
    assert one.arrays.prompt_ids.tolist() == [5, 6]  # written only where it is not the group's prompt
    assert other.arrays.prompt_ids.tolist() == [5, 6, 8]
    assert other.arrays.response_ids.tolist() == [9, 1]
    assert one.arrays.loss_mask.tolist() == [True, True, False]
    assert np.array_equal(one.arrays.rollout_logprobs, -np.linspace(0.1, 1.3, 3).astype(np.float32))
    assert one.arrays.rollout_logprobs.dtype == np.float32
    assert np.array_equal(other.arrays.routing, np.arange(290, 300).reshape(5, 1, 2))


def test_old_recordings_that_cannot_be_used(tmp_path):
    header, first, third = OLD.read_text().splitlines()

    def written(name: str, *lines: str, end: str = "\n") -> str:
        (tmp_path / name).write_text("\n".join(lines) + end)
        return str(tmp_path / name)

    with pytest.raises(UserError, match=r"b.jsonl:2 is damaged"):
        Replay(written("b.jsonl", header, first[:200]))
    with pytest.raises(UserError, match=r"d.jsonl:3: step 1 occurs a second time"):
        Replay(written("d.jsonl", header, first, first))
    with pytest.raises(UserError, match="step 1 is damaged"):
        Replay(written("e.jsonl", header, '{"step": 1, "groups": [}]}')).read(1)
    assert Replay(written("k.jsonl", header, first, third[:-9], end="")).steps == [1]  # of a killed run


# --- `grpo-megatron recording`


def test_a_recording_is_printed_as_json(tmp_path, capsys):
    """Any recording is printed as an earlier version would have written it."""

    def steps(text: str) -> list[dict]:
        return [json.loads(line) for line in text.splitlines()]

    old = steps(OLD.read_text())[1:]
    recorder = recorder_of(tmp_path / "r")
    for step in (1, 3):
        recorder.write(step, Replay(str(OLD)).read(step))
    for which in (OLD, tmp_path / "r"):
        capsys.readouterr()
        assert main(["recording", str(which)]) == 0
        assert steps(capsys.readouterr().out) == old
        assert main(["recording", str(which), "--step", "3"]) == 0
        assert steps(capsys.readouterr().out) == old[1:]
        assert main(["recording", str(which), "--step", "2"]) == 2
        assert "contains 2 steps, but not step 2" in capsys.readouterr().err
    assert main(["recording", "README.md"]) == 2
    assert "README.md is not a recording" in capsys.readouterr().err
    assert old[0]["step"] == 1
