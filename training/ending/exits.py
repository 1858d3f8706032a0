"""What a process says when it ends badly, and with which exit code."""

import os
import sys
import traceback

from ...mesh.errors import UserError
from ...mesh.text import printable
from .known_causes import is_lost_peer, known_cause, lost_peer

FINISHED = 0
FAILED = 1
"""An error nobody foresaw; its traceback is printed."""
USER_MISTAKE = UserError.exit_code
"""A config, file or argument that cannot work; trying again will not help."""
DIVERGED = 3
"""The loss is not finite, or the data is bad; trying again will not help."""
TRY_AGAIN = 75
"""Stopped from outside or by the machine; the same command resumes."""

LONGEST_LINE = 1500
"""Characters of a line that are printed."""

TRACEBACK_VARIABLE = "SPMDKIT_TRACEBACK"
RELAYED = {"SPMDKIT_RELAYED": "1"}
"""Of the environment of a process whose output a launcher relays: it marks its last words."""
MARK = "\x02\x02"
"""Begins each line of them. The launcher takes it away, and shows the words of one process, once all have ended."""
PLEASE_REPORT = (
    "This is an error that spmdkit did not foresee, not a mistake in your config. Please report it with the traceback "
    "above, the config, and what `pip list` says of jax."
)


def report_error(error: BaseException) -> int:
    """Prints an error to stderr as its reader needs it, and returns the exit code it stands for.

    A UserError, and any other error that names its code in an attribute `exit_code`, is printed as its message alone,
    or with its traceback where SPMDKIT_TRACEBACK=1; so is an error of the machine or of a file whose cause is known
    (see `known_causes`). Everything else is an error of ours: it is printed with its traceback and a request to report
    it. Control characters of what is quoted come out as escapes. For a launcher that relays it, lines begin with MARK.

    Args:
        error: What was raised.

    Returns:
        One of the codes of this file, or the code of a SystemExit.
    """
    if isinstance(error, SystemExit):
        return _system_exit_code(error)
    if isinstance(error, KeyboardInterrupt):
        print("interrupted; the same command goes on from the newest checkpoint, if there is one", file=sys.stderr)
        return TRY_AGAIN
    code, message = _code_and_message(error)
    text = printable("\n".join(map(_cut, message.split("\n"))))
    if code == FAILED or os.environ.get(TRACEBACK_VARIABLE, "0") != "0":
        text = "".join(traceback.format_exception(error)) + text
    is_relayed = all(os.environ.get(name) == value for name, value in RELAYED.items())
    print("\n".join(MARK + line for line in text.split("\n")) if is_relayed else text, file=sys.stderr)
    return code


def _cut(line: str) -> str:
    """A line without its middle where that is a value of thousands of characters."""
    return line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE // 2]} ... {line[-LONGEST_LINE // 2 :]}"


def _code_and_message(error: BaseException) -> tuple[int, str]:
    """The exit code of an error, and what is said of it."""
    if is_lost_peer(error):  # whatever was made of it: a save that failed, say
        return TRY_AGAIN, f"error: {lost_peer(error).message}"
    code = getattr(error, "exit_code", None)
    if code is not None:
        return code, f"error: {error}"
    cause = known_cause(error)
    return (cause.exit_code, f"error: {cause.message}") if cause else (FAILED, PLEASE_REPORT)


def _system_exit_code(error: SystemExit) -> int:
    """Returns what Python itself would exit with."""
    if isinstance(error.code, str):
        print(error.code, file=sys.stderr)
        return FAILED
    return error.code or FINISHED
