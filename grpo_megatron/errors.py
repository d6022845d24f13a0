"""Errors that a user can act on."""


class UserError(Exception):
    """Wrong input, configuration or environment: one message that says what to do.

    The command line prints the message without a traceback and exits with status 2. Anything that
    is not a UserError is a defect of ours and keeps its traceback.
    """
