"""Errors that the person at the command line can mend."""

import sysconfig
import traceback
from pathlib import Path


class UserError(ValueError):
    """Something the user gave cannot be used. The message is one line: what was given, what is allowed, what to do.

    The command line prints it as `sharpwave: error: ...`, without a traceback, and exits with code 2.
    """


class CheckpointError(UserError):
    """A checkpoint is missing, truncated, altered, of another program or version, or cannot be written."""


class RankFailed(UserError):
    """Another rank of a data-parallel run has failed, so that this one cannot go on. It has said why itself.

    is_shown: whether this rank repeats it, for its log.
    """

    def __init__(self, message: str, is_shown: bool = True):
        super().__init__(message)
        self.is_shown = is_shown


def own_frames(error: BaseException) -> list[str]:
    """Where in the user's own code, an environment say, an error came from: file, line and code of each frame.

    Empty where it passed through none. What is installed, the standard library and this package are not the user's.
    """
    ours, library = Path(__file__).parents[1], Path(sysconfig.get_path("stdlib"))
    cause: BaseException | None = error
    while cause is not None:
        lines = []
        for frame in traceback.extract_tb(cause.__traceback__):
            path = Path(frame.filename)
            installed = {"site-packages", "dist-packages"} & set(path.parts)
            if path.is_file() and not (installed or path.is_relative_to(ours) or path.is_relative_to(library)):
                lines += [f"  {path}:{frame.lineno}, in {frame.name}", f"    {frame.line}"]
        if lines:
            return lines
        cause = cause.__cause__
    return []
