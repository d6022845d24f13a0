"""A process of a conversion that dies before it is sent a unit, or before it has read the unit."""

import multiprocessing
import time
from functools import partial

import pytest

from grpo_megatron.conversion.pool import _distribute, _receive
from grpo_megatron.errors import UserError


def reads_nothing(connection):
    connection.send("here")
    time.sleep(60)


@pytest.mark.slow
@pytest.mark.parametrize("unit_is_sent", [False, True])
def test_it_is_one_message(unit_is_sent):
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=reads_nothing, args=(theirs,))
    process.start()
    theirs.close()
    assert ours.recv() == "here"
    if unit_is_sent:
        ours.send("unit")
    process.kill()
    process.join()
    use = (
        partial(_receive, ours, process)
        if unit_is_sent
        else partial(next, _distribute({ours: process}, ["unit"], print))
    )
    with pytest.raises(
        UserError, match=rf"a process of the conversion \(pid {process.pid}\) was killed by signal 9"
    ):
        use()
