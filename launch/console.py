"""The console of a command: streams that accept any text, warnings of one line, and a check of the address space.

Nothing here imports JAX or NumPy when a command starts.
"""

import errno
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

MIN_ADDRESS_SPACE = 2 * 2**30
"""The smallest run on simulated devices takes 1.8 GiB, most of it for the stacks of threads."""
PACKAGE, OWN = Path(__file__).resolve().parents[1], __name__.partition(".")[0]
INSTALLED = ("site-packages", "dist-packages")


def check_address_space() -> str:
    """Returns an error message if this process may not use enough addresses for JAX to start; "" otherwise.

    Below the limit, JAX's native threads abort the process without a message.
    """
    try:
        import resource
    except ImportError:
        return ""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit < 0 or limit >= MIN_ADDRESS_SPACE:
        return ""
    return (
        f"There is not enough memory: a process may use {limit / 2**30:.2f} GiB of addresses here (ulimit -v), and JAX "
        f"needs {MIN_ADDRESS_SPACE / 2**30:.0f} GiB to start. Raise the limit (ulimit -v unlimited), then run the same "
        "command again."
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
        with suppress(OSError, ValueError):
            if sys.stdout is not None:
                sys.stdout.flush()
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

    A warning of spmdkit is its text alone. One of an installed package names the package, and one of the user's code
    names the file and line.
    """
    from ..mesh.errors import printable  # slow; not needed for help texts

    text = " ".join(str(message).split())
    owner = "" if category.__module__.partition(".")[0] == OWN else _find_owner(filename, lineno)
    kind = "" if category in (UserWarning, Warning) or not owner else f"{category.__name__} "
    return printable(f"warning: {text}{f' ({kind}of {owner})' if owner else ''}") + "\n"


def _find_owner(filename: str, lineno: int) -> str:
    """Returns the package or file that gave a warning; "" for spmdkit."""
    path = Path(filename)
    packages = [part for before, part in pairwise(path.parts) if before in INSTALLED]
    if packages:
        return packages[-1].removesuffix(".py") if packages[-1] != OWN else ""
    return "" if path.is_relative_to(PACKAGE) else f"{filename}, line {lineno}"
