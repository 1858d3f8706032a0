"""The exit codes of every command."""

FINISHED = 0
FAILED = 1
"""An unexpected error; its traceback is printed."""
INVALID_INPUT = 2
"""An invalid config, file or argument; trying again does not help."""
DIVERGED = 3
"""The loss is not finite, or the data is invalid; trying again does not help."""
TRY_AGAIN = 75
"""Stopped from outside or by the machine; the same command resumes."""
