"""The pack for a GPU machine without a network: its contents, detection of damage, and results that
survive failures.
"""

import json
import re
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from lock_gpu import Lock

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from on_gpu import call, pack
from on_gpu.call import Call, Step

LOCK = Lock.read()


def listed(tmp_path: Path, *lines: str) -> pack.Image:
    (tmp_path / "have.txt").write_text("\n".join(lines))
    return pack.Image(tmp_path / "have.txt")


def test_a_dry_run_lists_parts_sizes_and_scripts():
    command = [sys.executable, "benchmarks/on_gpu/pack.py", "--dry-run"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    sizes = [float(size) for size in re.findall(r"\w+\.\d+ ([\d.]+) MB", text)]
    assert len(sizes) >= 2
    assert all(0 < size <= 60 for size in sizes)
    assert re.findall(r"^(\d-[\w-]+\.sh)", text, re.M) == [
        "1-bring-up.sh",
        "2-speed.sh",
        "3-precision.sh",
        "4-engine.sh",
    ]
    assert re.search(
        rf"MB  transformer-engine-cu13 {re.escape(LOCK.packages['transformer-engine-cu13'].version)}$",
        text,
        re.M,
    )


def test_no_call_takes_more_than_ten_minutes():
    assert call.CALL_SECONDS + call._GRACE_SECONDS < 600
    for one in call.CALLS.values():
        assert all(step.seconds <= call.CALL_SECONDS for step in one.steps)
        assert one.bundles[0] == "training"


@pytest.mark.parametrize(
    ("lines", "carried", "left_out"),
    [
        (["torch==2.11.0+cu130", "numpy==2.5.2"], {"einops", "safetensors", "onnx"}, {"torch", "numpy"}),
        (["transformers==5.17.0"], {"transformers"}, set()),
        (
            ["transformers==5.12.1", "safetensors"],
            {"typing-extensions"},
            {"transformers", "tokenizers", "safetensors"},
        ),
        (["Typing_Extensions==4.99", "zstandard"], set(), {"typing-extensions", "zstandard"}),
        (["typing-extensions==3.7"], {"typing-extensions"}, set()),
        (
            ["ray==2.60.0", "# pydantic", "-e git+x"],
            {"pydantic", "pydantic-core", "annotated-types"},
            {"ray"},
        ),
    ],
)
def test_what_the_machine_lacks_or_has_in_another_version_is_carried(tmp_path, lines, carried, left_out):
    chosen = pack.contents(LOCK, listed(tmp_path, *lines))
    names = [name for bundle in chosen.values() for name in bundle]
    assert len(names) == len(set(names))
    assert carried <= set(names)
    assert not left_out & set(names)


def test_every_package_is_one_of_the_lock():
    for bundle in pack.BUNDLES.values():
        assert {*bundle.packages, *bundle.alone} <= LOCK.packages.keys()


@pytest.fixture
def packed(tmp_path, monkeypatch):
    """(folder of a pack with a bundle in three parts, folder to unpack it to)"""
    monkeypatch.setattr(pack, "PART_BYTES", 5000)
    (tmp_path / "content").write_bytes(bytes(range(250)) * 40)
    with tarfile.open(tmp_path / "whole", "w") as archive:
        archive.add(tmp_path / "content", "project/content")
    out = tmp_path / "pack"
    out.mkdir()
    parts = pack.split("training", tmp_path / "whole", out)
    (out / "parts.json").write_text(json.dumps({"bundles": {"training": parts}}))
    return out, tmp_path / "home"


@pytest.fixture
def without_pip(monkeypatch):
    """Replace pip, because there is no wheel to install."""
    monkeypatch.setattr(call.subprocess, "run", lambda *args, **kwargs: None)


def test_parts_are_joined_and_unpacked_once(packed, without_pip):
    out, home = packed
    names = sorted(path.name for path in out.glob("training.*"))
    assert len(names) > 2
    assert all(path.stat().st_size <= 5000 for path in out.glob("training.*"))
    call.Pack(out, home, dry_run=False).unpack("training")
    assert (home / "project/content").read_bytes() == bytes(range(250)) * 40
    (out / names[0]).unlink()  # not needed a second time
    call.Pack(out, home, dry_run=False).unpack("training")


@pytest.mark.parametrize("damage", ["changed", "short", "swapped", "missing", "empty"])
def test_a_damaged_part_is_named(packed, without_pip, damage):
    out, home = packed
    part = out / "training.2"
    content = bytearray(part.read_bytes())
    if damage == "changed":
        content[100] ^= 1
    part.write_bytes(
        {"short": content[:-1], "swapped": (out / "training.1").read_bytes(), "empty": b""}.get(
            damage, content
        )
    )
    if damage == "missing":
        part.unlink()
    with pytest.raises(SystemExit, match=r"training\.2 is (missing|damaged)"):
        call.Pack(out, home, dry_run=False).unpack("training")
    assert not (home / "training.done").exists()


def run_call(tmp_path, monkeypatch, *steps: Step, seconds: int = 60) -> tuple[int, dict]:
    """Return (exit status, summary.json) of a call with these steps."""
    monkeypatch.setattr(call, "CALLS", {"bring-up": Call("a test", (), steps)})
    monkeypatch.setattr(call, "CALL_SECONDS", seconds)
    monkeypatch.setattr(call, "_DRY_RUN_FACTOR", 1)
    monkeypatch.setattr(
        sys, "argv", ["call.py", "bring-up", str(tmp_path / "results"), "--home", str(tmp_path), "--dry-run"]
    )
    status = call.main()
    return status, json.loads((tmp_path / "results/summary.json").read_text())


def step(name: str, command: str | None, seconds: int = 30, required: bool = False) -> Step:
    return Step(name, seconds, "exit 99", command, required)


def test_steps_after_one_that_fails_still_run(tmp_path, monkeypatch, capsys):
    steps = (
        step("good", "echo fine"),
        step("bad", "echo the reason; exit 3"),
        step("after", "true"),
        step("nothing", None),
    )
    status, summary = run_call(tmp_path, monkeypatch, *steps)
    assert status == 1
    assert {name: one["status"] for name, one in summary["steps"].items()} == {
        "good": "ok",
        "bad": "exit 3",
        "after": "ok",
        "nothing": "skipped",
    }
    assert summary["failed"] == ["bad"]
    printed = capsys.readouterr().out
    assert "the reason" in printed
    assert "fine" not in printed
    assert (tmp_path / "results/good.log").read_text() == "fine\n"


def test_nothing_runs_after_a_required_step_that_fails(tmp_path, monkeypatch):
    _, summary = run_call(
        tmp_path, monkeypatch, step("import", "exit 1", required=True), step("tests", "true")
    )
    assert summary["failed"] == ["import", "tests"]
    assert summary["steps"]["tests"]["status"] == "not run"


@pytest.mark.slow
def test_tests_that_run_out_of_time_leave_their_results(tmp_path, monkeypatch):
    (tmp_path / "test_two.py").write_text(
        "import time\n\ndef test_one(): pass\n\ndef test_two(): time.sleep(60)\n"
    )
    command = f"{call._PYTEST} {tmp_path}/test_two.py --rootdir {tmp_path}"
    status, summary = run_call(
        tmp_path, monkeypatch, step("tests", command, seconds=5), step("after", "true")
    )
    assert status == 1
    assert summary["steps"]["tests"]["status"] == "timed out"
    assert summary["steps"]["after"]["status"] == "ok"
    cases = ElementTree.parse(tmp_path / "results/tests.xml").iter("testcase")
    assert "test_one" in [case.get("name") for case in cases]


def test_a_call_ends_before_its_time_is_up(tmp_path, monkeypatch):
    monkeypatch.setattr(call, "_GRACE_SECONDS", 1)
    # A process that ignores SIGINT is killed, and what it started with it.
    stubborn = step("stubborn", "trap '' INT; sleep 50 & sleep 50")
    _, summary = run_call(tmp_path, monkeypatch, stubborn, step("late", "true"), seconds=3)
    assert summary["steps"]["stubborn"]["status"] == "timed out"
    assert summary["steps"]["late"]["status"] == "not run"
    assert sum(one["seconds"] for one in summary["steps"].values()) < 10
