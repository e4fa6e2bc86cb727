"""Errors that the person at the command line can mend."""


class UserError(ValueError):
    """Something the user gave cannot be used. The message is one line: what was given, what is allowed, what to do.

    The command line prints it as `sharpwave: error: ...`, without a traceback, and exits with code 2.
    """


class CheckpointError(UserError):
    """A checkpoint is missing, truncated, altered, of another program or version, or cannot be written."""
