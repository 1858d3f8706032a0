"""What a process is given before it does anything: standard streams, a locale, an address space.

Text that the terminal cannot show, and a reader that has gone, do no harm. Nothing here imports JAX or NumPy.
"""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

LEAST_ADDRESSES = 2 * 2**30
"""What the smallest run on simulated devices takes is 1.8 GiB, most of it the stacks of threads."""


def restart_in_utf8() -> None:
    """Starts this process anew in Python's UTF-8 mode where its locale is another, as C or Latin-1.

    Paths in a config are UTF-8; under such a locale Python could not open them, nor name them. Does nothing elsewhere.
    """
    if sys.flags.utf8_mode or sys.getfilesystemencoding().lower() in ("utf-8", "utf8") or os.name != "posix":
        return
    if sys.executable:
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def open_closed_streams() -> None:
    """Opens the null device for standard streams that were closed (`>&-`), so that no other file gets their number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  (lives as long as the process)


def too_little_memory() -> str:
    """Explains that this process may not use enough addresses for JAX to start; "" where it may, or nobody knows.

    Below the limit its native threads abort the process without a word of ours.
    """
    try:
        import resource
    except ImportError:
        return ""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit < 0 or limit >= LEAST_ADDRESSES:
        return ""
    return (
        f"There is not enough memory: a process may use {limit / 2**30:.2f} GiB of addresses here (ulimit -v), and JAX "
        f"takes {LEAST_ADDRESSES / 2**30:.0f} GiB to start. Raise the limit (ulimit -v unlimited), then start the same "
        "command again."
    )


@contextmanager
def tolerant_streams() -> Iterator[None]:
    """For the duration of a `with` block stdout and stderr take any text, and drop it once their reader has gone."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_Tolerant(stream) for stream in before)
    try:
        yield
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        sys.stdout, sys.stderr = before


def outlive_output() -> None:
    """From here on a stream that takes no more is no error of this command: it is said once, and the rest dropped.

    For what goes on for days, and keeps on disk what matters; for `tolerant_streams` alone.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, _Tolerant):
            stream.outlived = True


class _Tolerant:
    """A text stream: what its encoding lacks is written as an escape; what a closed pipe does not take is dropped.

    So is what a terminal that has gone does not take. Any other failure is raised once, as an OSError that names the
    stream; where it is to be outlived, it is a warning.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._gone = {errno.EPIPE, errno.EIO} if _is_terminal(stream) else {errno.EPIPE}
        self.outlived = False
        if getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")

    def write(self, text: str) -> int:
        """Writes a text."""
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Writes what is held back."""
        self._try(self._stream.flush)

    def _try(self, action: Any) -> None:
        try:
            action()
        except OSError as error:
            self._drop_the_rest()
            if error.errno in self._gone:
                return
            name = "the standard output" if self._stream is not sys.__stderr__ else "the standard error"
            if not self.outlived:
                raise OSError(error.errno, error.strerror, name) from None
            if self._stream is not sys.__stderr__:
                print(f"warning: {name}: {error.strerror}; from here on nothing is printed there", file=sys.stderr)

    def _drop_the_rest(self) -> None:
        """Leads the stream, with what it still holds, to the null device."""
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())
        os.close(null)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _is_terminal(stream: Any) -> bool:
    try:
        return stream.isatty()
    except (AttributeError, ValueError):
        return False
