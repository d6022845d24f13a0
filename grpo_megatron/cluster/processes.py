"""Waiting on many remote calls, and turning what goes wrong into one clear error."""

import logging
import os
import sys
import time

import ray
from ray.exceptions import RayActorError, RayTaskError

from grpo_megatron.errors import UserError

logger = logging.getLogger(__name__)


class ProcessDied(UserError):
    """A trainer rank or an engine is gone; says which one, and where its log is."""


def redirect_output(path: str) -> None:
    """Send this process's and its children's stdout and stderr to a file."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)


def gather(references: dict, who: dict, timeout: float | None = None) -> dict:
    """Results of {key: ObjectRef}; raises as soon as the first one fails.

    Waiting for all of them first would wait for ranks that sit in a collective whose partner is
    dead. who: {key: (name, log file)} for the message. Errors that a UserError caused on the other
    side are raised as such.
    """
    keys = {reference: key for key, reference in references.items()}
    pending, results = list(keys), {}
    while pending:
        ready, pending = ray.wait(pending, num_returns=1, timeout=timeout)
        if not ready:
            names = ", ".join(who[keys[reference]][0] for reference in pending)
            raise UserError(f"no answer within {timeout:.0f} s from {names}")
        key = keys[ready[0]]
        try:
            results[key] = fetch(ready[0], *who[key])
        except RuntimeError:
            # A rank whose partner died in a collective often fails before the death is known.
            _raise_if_one_died(pending, keys, who)
            raise
    return {key: results[key] for key in references}


def _raise_if_one_died(pending: list, keys: dict, who: dict, grace: float = 5.0) -> None:
    deadline = time.monotonic() + grace
    while pending and time.monotonic() < deadline:
        ready, pending = ray.wait(pending, num_returns=1, timeout=deadline - time.monotonic())
        for reference in ready:
            try:
                fetch(reference, *who[keys[reference]])
            except ProcessDied:
                raise
            except Exception:
                logger.debug("also failed: %s", keys[reference], exc_info=True)


def fetch(reference, name: str, log: str):
    """ray.get with the errors of this module."""
    try:
        return ray.get(reference)
    except RayActorError as error:
        raise ProcessDied(died(name, log)) from error
    except RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise error.cause from None
        raise RuntimeError(f"{name} failed; its log is {log}\n{error}") from None


def died(name: str, log: str) -> str:
    """The message for a process that is gone, with the end of its log."""
    return f"{name} died; its log is {log}\n{_tail(log)}"


def _tail(path: str, lines: int = 15) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return "".join(f"  | {line}" for line in file.readlines()[-lines:])
    except OSError:
        return "  (the log cannot be read from here)"
