"""The console of a command: streams that accept any text, warnings of one line, and a check of the address space.

Nothing here imports JAX or NumPy when a command starts.
"""

import errno
import os
import resource
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..training.stopping.interrupts import TRY_AGAIN  # not from mesh/, which imports JAX

MIN_ADDRESS_SPACE = 2 * 2**30
"""The smallest run on simulated devices takes 1.8 GiB, most of it for the stacks of threads."""


class TooFewAddresses(RuntimeError):
    """This process may not use enough addresses for JAX to start."""

    exit_code = TRY_AGAIN


def check_address_space() -> None:
    """Checks the limit below which JAX's native threads abort the process without a message.

    Raises:
        TooFewAddresses: The limit is too low.
    """
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if 0 <= limit < MIN_ADDRESS_SPACE:
        raise TooFewAddresses(
            f"There is not enough memory: a process may use {limit / 2**30:.2f} GiB of addresses here (ulimit -v), and "
            f"JAX needs {MIN_ADDRESS_SPACE / 2**30:.0f} GiB to start. Raise the limit (ulimit -v unlimited), then run "
            "the same command again."
        )


@contextmanager
def open_console() -> Iterator[None]:
    """Makes stdout and stderr accept any text, even if the reader is gone, and prints warnings as one line each."""
    before = sys.stdout, sys.stderr, warnings.formatwarning
    sys.stdout, sys.stderr = (None if stream is None else _TolerantStream(stream) for stream in before[:2])
    warnings.formatwarning = format_warning
    try:
        yield
    finally:
        sys.stdout, sys.stderr, warnings.formatwarning = before


def ignore_output_errors() -> None:
    """From now on, prints one warning if a stream cannot be written, instead of an error.

    Used by commands that run for days and keep everything important on disk. Only applies within `open_console`.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, _TolerantStream):
            stream.ignores_errors = True


class _TolerantStream:
    """A text stream that escapes characters that its encoding lacks, and drops the output after its reader is gone.

    Any other failure is raised once, as an OSError with the name of the stream; or it is a warning.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.ignores_errors = False
        if getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except OSError as error:
            is_terminal = self._stream.isatty()
            null = os.open(os.devnull, os.O_WRONLY)  # for the rest, including the stream's own buffer
            os.dup2(null, self._stream.fileno())
            os.close(null)
            if error.errno == errno.EPIPE or (is_terminal and error.errno == errno.EIO):
                return
            name = "the standard output" if self._stream is not sys.__stderr__ else "the standard error"
            if not self.ignores_errors:
                raise OSError(error.errno, error.strerror, name) from None
            if self._stream is not sys.__stderr__:
                print(f"warning: {name}: {error.strerror}; nothing more is printed there", file=sys.stderr)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Returns a warning as one line; the arguments are those of `warnings.formatwarning`.

    A UserWarning is for users, so its text is enough; other warnings name their class and place.
    """
    from ..mesh.errors import printable  # slow; not needed for help texts

    place = "" if issubclass(category, UserWarning) else f" ({category.__name__}, {filename}:{lineno})"
    return printable(f"warning: {' '.join(str(message).split())}{place}") + "\n"
