"""Lines and the progress bar of a terminal or a job's log. Neither may stop a run."""

import io
import logging
import os
import sys
import time
from contextlib import suppress

import pytest

from grpo_megatron.logs import Rarely, show_messages
from grpo_megatron.monitoring.terminal import Terminal

logger = logging.getLogger("grpo_megatron.test")


def test_a_line_that_nobody_can_have_ends_no_run(monkeypatch):
    """Causes are a full disk behind a job's log, and a session that is gone."""
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        logger.info("x" * 10_000)
        monkeypatch.undo()
        with suppress(OSError):
            full.close()
    reader, writer = os.pipe()
    os.close(reader)
    broken = open(writer, "w")  # noqa: SIM115 - closing it raises
    monkeypatch.setattr("sys.stdout", broken)
    logger.info("nobody reads")
    monkeypatch.undo()
    with suppress(OSError):
        broken.close()


def test_messages_are_plain_lines(capsys):
    """They have no level or time, also if the command line is called again."""
    show_messages()
    logger.info("checkpoint step_00000001: 100% written")
    logger.warning("its rows wait")
    logger.debug("of interest to nobody")
    assert capsys.readouterr().out == "checkpoint step_00000001: 100% written\nits rows wait\n"


@pytest.mark.parametrize(("once", "shown"), [(False, [1, 2, 4, 8]), (True, [1])])
def test_a_repeated_warning_is_shown_rarely(once, shown, capsys):
    warn = Rarely(logger, once)
    for number in range(1, 10):
        warn(f"warning {number}")
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split()[1]) for line in lines] == shown
    assert ["times so far" in line for line in lines] == [number > 1 for number in shown]


class FakeTerminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_has_a_bar_and_a_job_log_has_none(monkeypatch):
    row = {"throughput/tokens_per_second": 7.0, "time/step": 1.0, "time/train": 0.5}

    def shown(stream) -> str:
        monkeypatch.setattr(sys, "stderr", stream)
        terminal = Terminal(total_steps=4, resumed=1)
        assert terminal.eta is None
        for step in (2, 3):
            terminal.start_step()
            terminal.phase("train")
            time.sleep(0.15)
            terminal.finish_step(step)
            terminal.line(step, row)
        assert 0.1 < terminal.eta < 30
        terminal.close()
        return stream.getvalue()

    bar = shown(FakeTerminal())
    assert "3/4" in bar
    assert "train" in bar
    assert shown(io.StringIO()) == ""
