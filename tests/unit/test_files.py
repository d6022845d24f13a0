"""Files that this project writes: JSON that any reader accepts, and what becomes of them on a full disk."""

import io
import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError

from grpo_megatron.errors import UserError
from grpo_megatron.files import float_or_nan, json_text, new_file, replace_text, writing

FULL = "/dev/full"  # the kernel's disk without space
ROOT = Path(__file__).parents[2]
# The sandbox's processes exchange messages among themselves, without this package's modules. config/keys.py
# quotes a text. The two tools and the program beside verifiers run without this package.
OTHERS = ("grpo_megatron/sandbox/", "grpo_megatron/config/keys.py", "grpo_megatron/files.py")
OTHERS += ("tools/faked_h100.py", "tools/lock_gpu.py", "grpo_megatron/rollout/published/program.py")


def strict(text):
    """Parse JSON like every reader but Python's own."""

    def refuse(word):
        raise ValueError(word)

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ({"actor/loss": math.nan}, {"actor/loss": None}),
        ({"a": math.inf, "b": -math.inf, "c": 1.5}, {"a": None, "b": None, "c": 1.5}),
        ({"a": np.float64("nan")}, {"a": None}),
        ([{"a": [1.0, math.nan]}, (math.inf, 2)], [{"a": [1.0, None]}, [None, 2]]),
        ({"deep": {"er": {"list": [[math.nan]]}}}, {"deep": {"er": {"list": [[None]]}}}),
        (math.nan, None),
        (
            {"a": 0.1, "b": "NaN", "c": True, "d": None, "e": 10**30},
            {"a": 0.1, "b": "NaN", "c": True, "d": None, "e": 10**30},
        ),
    ],
)
def test_there_is_no_bare_nan(value, read):
    """jq, pandas and browsers used to refuse whole files of metrics because of one NaN."""
    assert strict(json_text(value)) == read
    assert strict(json_text(value, indent=2)) == read


def test_a_number_that_was_not_finite_is_read_as_nan():
    row = strict(json_text({"a": math.inf, "b": 0.25}))
    assert math.isnan(float_or_nan(row["a"]))
    assert float_or_nan(row["b"]) == 0.25


def test_other_programs_read_the_rows():
    rows = "".join(
        json_text({"step": step, "loss": loss}) + "\n"
        for step, loss in enumerate([0.5, math.nan, -math.inf], 1)
    )
    pandas = pytest.importorskip("pandas")
    table = pandas.read_json(io.StringIO(rows), lines=True)
    assert table["loss"].dtype == "float64"
    assert table["loss"].isna().tolist() == [False, True, True]
    if jq := shutil.which("jq"):
        found = subprocess.run([jq, "-c", ".loss"], input=rows, capture_output=True, text=True, check=True)
        assert found.stdout.split() == ["0.5", "null", "null"]


def test_there_is_one_writer():
    sources = (
        path for folder in ("grpo_megatron", "tools", "slurm") for path in (ROOT / folder).rglob("*.py")
    )
    found = {
        str(path.relative_to(ROOT))
        for path in sources
        if re.search(r"\bjson\.dumps?\(", path.read_text("utf-8"))
    }
    assert {path for path in found if not path.startswith(OTHERS)} == set()


def test_a_reader_sees_the_old_file_or_the_whole_new_one(tmp_path):
    path = tmp_path / "settings.json"
    replace_text(path, "old")
    with new_file(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    with pytest.raises(ZeroDivisionError), new_file(path) as file:
        file.write(b"half" * (1 // 0))
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_named():
    with (
        pytest.raises(
            UserError, match=r"^/run/hf cannot be written: No space left on device; free some space"
        ),
        writing("/run/hf"),
        open(FULL, "w", encoding="utf-8") as file,
    ):
        file.write("x")


@pytest.mark.parametrize(
    "error",
    [
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"),
    ],
)
def test_a_full_disk_is_known_by_the_words_of_libraries(error):
    """The words are those of safetensors and torch.save, on a tmpfs of 1 MB.

    FULL does not suit them, because they replace it by a new file.
    """
    with pytest.raises(UserError, match=r"No space left on device"), writing("/run/hf"):
        raise error


def test_another_problem_of_the_disk_is_named(tmp_path):
    with (
        pytest.raises(
            UserError, match=r"cannot be written: Is a directory; check that the disk works and is writable"
        ),
        writing(tmp_path),
    ):
        tmp_path.write_text("x")


def test_what_is_not_the_disks_goes_through():
    with pytest.raises(ZeroDivisionError), writing("/run/hf"):
        1 / 0  # noqa: B018
