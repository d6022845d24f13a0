"""Errors that a user can act on."""

# What to do where a run's checkpoint does not fit what is configured now.
ANOTHER_RUN = "run.resume=none starts anew, another run.name leaves it alone"


class UserError(Exception):
    """Wrong input, configuration or environment: one message that says what to do.

    The command line prints the message without a traceback and exits with status 2. Anything that
    is not a UserError is a defect of ours and keeps its traceback.
    """


def shortened(text: object, length: int = 80) -> str:
    """What a user gave, as a message can quote it: at most `length` characters, the rest as `…`."""
    text = str(text)
    return text if len(text) <= length else text[: length - 1] + "…"
