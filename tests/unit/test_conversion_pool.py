"""The worker processes of a conversion: results, errors, and a process that is killed."""

import multiprocessing
import os
import signal
from dataclasses import dataclass

import pytest

from grpo_megatron.conversion.pool import run
from grpo_megatron.errors import UserError


@dataclass
class Doubling:
    """A job that doubles numbers. Some numbers stand for what can go wrong."""

    first: int = 0

    def start(self) -> None:
        if self.first < 0:
            raise UserError("the source is damaged")

    def do(self, unit: int, advance) -> int:
        if unit == 13:
            raise UserError("13 cannot be doubled")
        if unit == 99:
            os.kill(os.getpid(), signal.SIGKILL)
        advance(unit)
        return 2 * unit


def doubled(units: list[int], processes: int, first: int = 0) -> dict[int, int]:
    found = {}
    progress = run(Doubling(first), units, processes, "doubling", sum(units), found.__setitem__)
    assert progress.bytes == sum(units)
    assert progress.seconds >= 0
    assert multiprocessing.active_children() == []
    return found


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_each_unit_has_its_result(processes):
    assert doubled([1, 2, 3, 4, 5], processes) == {1: 2, 2: 4, 3: 6, 4: 8, 5: 10}


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("units", "first", "message"),
    [([1, 13, 2], 0, r"^13 cannot be doubled$"), ([1, 2], -1, r"^the source is damaged$")],
)
def test_an_error_of_the_user_is_passed_on(units, first, message, processes):
    with pytest.raises(UserError, match=message):
        doubled(units, processes, first)
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_a_killed_process_is_named_with_what_to_do():
    with pytest.raises(
        UserError,
        match=r"a conversion process \(pid \d+\) was killed by signal 9; if .* use fewer processes \(--proc",
    ):
        doubled([1, 99, 3], 2)
    assert multiprocessing.active_children() == []
