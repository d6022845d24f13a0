"""Errors of a disk while something is written."""

import pytest
from safetensors import SafetensorError

from grpo_megatron.errors import UserError
from grpo_megatron.paths import writing

FULL = "/dev/full"  # the kernel's disk without space


def test_a_full_disk_is_named():
    with (
        pytest.raises(UserError, match=r"^/run/hf cannot be written: No space left on device; make room"),
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
