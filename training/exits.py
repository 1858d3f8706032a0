"""What a process says when it ends badly, and with which exit code."""

import os
import sys
import traceback

FINISHED = 0
FAILED = 1
"""An error nobody foresaw; its traceback is printed."""
USER_MISTAKE = 2
"""A config, file or argument that cannot work; trying again will not help."""
DIVERGED = 3
"""The loss is not finite, or the data is bad; trying again will not help."""
TRY_AGAIN = 75
"""Stopped from outside or by the machine; the same command resumes."""

TRACEBACK_VARIABLE = "SPMDKIT_TRACEBACK"


def report_error(error: BaseException) -> int:
    """Prints an error to stderr as its reader needs it, and returns the exit code it stands for.

    A ValueError that this package raised is a user's mistake: its message alone is printed, or the traceback as well
    where SPMDKIT_TRACEBACK=1. Any error may name its own code in an attribute `exit_code`, and is printed the same way.
    Everything else is printed with its traceback.

    Args:
        error: What was raised.

    Returns:
        One of the codes of this file, or the code of a SystemExit.
    """
    if isinstance(error, SystemExit):
        return _system_exit_code(error)
    if isinstance(error, KeyboardInterrupt):
        print("interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        return TRY_AGAIN
    code = getattr(error, "exit_code", None)
    if code is None and isinstance(error, ValueError) and _raised_here(error):
        code = USER_MISTAKE
    if code is None or os.environ.get(TRACEBACK_VARIABLE, "0") != "0":
        traceback.print_exception(error)
    if code is not None:
        print(f"error: {error}", file=sys.stderr)
    return FAILED if code is None else code


def _system_exit_code(error: SystemExit) -> int:
    """Returns what Python itself would exit with."""
    if isinstance(error.code, str):
        print(error.code, file=sys.stderr)
        return FAILED
    return error.code or FINISHED


def _raised_here(error: BaseException) -> bool:
    """Tells whether the innermost frame of an error is in this package, not in JAX or in the user's code."""
    frame = error.__traceback__
    if frame is None:
        return False
    while frame.tb_next is not None:
        frame = frame.tb_next
    return frame.tb_frame.f_globals.get("__name__", "").startswith("spmdkit.")
