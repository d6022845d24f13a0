"""Errors that a user can act on."""

from unicodedata import category

# Advice for messages: a run's checkpoint does not fit the present configuration.
ANOTHER_RUN = "set run.resume=none to start over, or set a different run.name to start a separate run"


class UserError(Exception):
    """Error that a user can correct: wrong input, configuration or environment. The message says what to do.

    The command line prints the message without a traceback and exits with `exit_status`. Any other exception
    is a defect of this program and keeps its traceback.
    """

    exit_status = 2


class ProcessLost(UserError):
    """Error: a process that the run needs is dead or does not answer.

    The run could continue if a new process replaced the lost one.
    """

    exit_status = 3


class Stopped(Exception):
    """Exception: the run has stopped on request, such as a signal. The same command continues the run."""

    exit_status = 75  # EX_TEMPFAIL: a scheduler should put the job into its queue again


def last_message(error: UserError | Stopped) -> str:
    """Return the message that the program prints when it ends because of this error."""
    return str(error) if isinstance(error, Stopped) else f"error: {error}"


def shortened(text: object, length: int = 80) -> str:
    """Cut `text` to at most `length` characters, to use it in a message. A `…` at the end marks the cut."""
    text = str(text)
    return text if len(text) <= length else text[: length - 1] + "…"


def printable(text: str) -> str:
    """Return `text` with control characters other than newline and tab replaced, to show it on a terminal.

    A text may quote anything, such as a model's output, and control characters in it could change other
    lines on the terminal. U+FFFD replaces each of these characters.
    """
    return "".join(
        "\N{REPLACEMENT CHARACTER}" if category(c).startswith("C") and c not in "\n\t" else c for c in text
    )


def described(error: BaseException) -> str:
    """Describe an exception of a user's or a library's code for an error message, as `TYPE: TEXT`.

    The description has at most 2000 characters, and no control characters that could upset a terminal.
    """
    try:
        text = str(error)
    except Exception:  # str() may fail, as for an int with too many digits to print
        text = "its text cannot be shown"
    return printable(shortened(f"{type(error).__name__}: {text}", 2000))
