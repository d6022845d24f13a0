"""Errors that a user can act on."""

from unicodedata import category

# What to do where a run's checkpoint does not fit what is configured now.
ANOTHER_RUN = "run.resume=none starts anew, another run.name leaves it alone"


class UserError(Exception):
    """Wrong input, configuration or environment: one message that says what to do.

    The command line prints the message without a traceback and exits with `exit_status`. Anything that
    is not a UserError is a defect of ours and keeps its traceback.
    """

    exit_status = 2


class ProcessLost(UserError):
    """A process that the run needs is dead, or does not answer; another in its place could go on."""

    exit_status = 3


class Stopped(Exception):
    """The run has left on request, and can go on."""

    exit_status = 75  # EX_TEMPFAIL: a scheduler should put the job into its queue again


def shortened(text: object, length: int = 80) -> str:
    """What a user gave, as a message can quote it: at most `length` characters, the rest as `…`."""
    text = str(text)
    return text if len(text) <= length else text[: length - 1] + "…"


def printable(text: str) -> str:
    """What may quote anybody, such as a model, as a terminal can show it: a control character could rewrite what stands there."""
    return "".join(
        "\N{REPLACEMENT CHARACTER}" if category(c).startswith("C") and c not in "\n\t" else c for c in text
    )


def described(error: BaseException) -> str:
    """Return the type and text of an error that somebody else's code raised, as a message can quote them."""
    try:
        text = str(error)
    except Exception:  # such as an error about an int of more digits than Python writes
        text = "its text cannot be shown"
    return printable(shortened(f"{type(error).__name__}: {text}", 2000))
