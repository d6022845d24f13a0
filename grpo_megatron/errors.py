"""Errors that a user can act on."""

from unicodedata import category

# Advice for messages: a run's checkpoint does not fit the present configuration.
ANOTHER_RUN = "set run.resume=none to start over, or set a different run.name to start a separate run"


class UserError(Exception):
    """Wrong input, configuration or environment: one message that says what to do.

    The command line prints the message without a traceback and exits with `exit_status`. Any other exception
    is a defect of this program and keeps its traceback.
    """

    exit_status = 2


class ProcessLost(UserError):
    """A process that the run needs is dead or does not answer. The run could go on with a replacement."""

    exit_status = 3


class Stopped(Exception):
    """The run has stopped on request. The same command continues it."""

    exit_status = 75  # EX_TEMPFAIL: a scheduler should put the job into its queue again


def last_message(error: UserError | Stopped) -> str:
    """Return the last line that the program prints when it ends because of this error."""
    return str(error) if isinstance(error, Stopped) else f"error: {error}"


def shortened(text: object, length: int = 80) -> str:
    """Return `text` cut to at most `length` characters, for a message. A last `…` marks the cut."""
    text = str(text)
    return text if len(text) <= length else text[: length - 1] + "…"


def printable(text: str) -> str:
    """Return `text` with control characters replaced, so that a terminal can show it safely.

    The text may quote anything, such as a model's output. Control characters in it could rewrite what the
    terminal shows.
    """
    return "".join(
        "\N{REPLACEMENT CHARACTER}" if category(c).startswith("C") and c not in "\n\t" else c for c in text
    )


def described(error: BaseException) -> str:
    """Return `TYPE: TEXT` of an exception that a user's or a library's code raised, for an error message.

    The text is shortened and safe for a terminal.
    """
    try:
        text = str(error)
    except Exception:  # str() may fail, as for an int with too many digits to print
        text = "its text cannot be shown"
    return printable(shortened(f"{type(error).__name__}: {text}", 2000))
