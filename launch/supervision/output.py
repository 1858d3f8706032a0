"""The output of the processes of a run: one stream with the rank before each line, and one log file per rank."""

import codecs
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing, suppress
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

from ...mesh.errors import printable
from ...mesh.known_causes import MARK

LAUNCHER = "spmdkit launch: "
COLORS = (36, 33, 35, 32, 34, 31)
COLOR = re.compile(r"(\x1b\[[0-9;:]*m)")
RESET = "\x1b[0m"
GLOO_PIECES = re.compile(
    r"\[Gloo\] Rank \d*| ?\d* is connected to \d*| ?\d* peer ranks\. "
    r"| ?Expected number of connected peer ranks is : \d*"
)
"""The fragments of Gloo's greeting: the threads of a process write them over each other."""
HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2028\u2029\u2066-\u2069]")
"""The characters that `printable` writes as escapes."""
MARKS = re.compile(rb"(?m)^" + MARK.encode())
CHUNK_BYTES = 1 << 16
MAX_PENDING_BYTES = 1 << 13
"""A line without a newline is shown in pieces of at least this size."""
MAX_TAIL_LINES, MAX_TAIL_CHARACTERS = 400, 2000
TAG = re.compile(rb"\[\d+,(\d+)\]<std(?:out|err|diag)>:|\[[^\s\[\]]*@\d+,(\d+)\]<std(?:out|err|diag)>: ?")
"""Open MPI 4: `[14779,1]<stdout>:`; 5: `[prterun-host-14779@1,1]<stdout>: `."""
RULE = re.compile(r"-*\s*")
_printing = threading.Lock()


def announce(line: str) -> None:
    """Prints a line of the launcher to stderr; an indented line stands without the launcher's name."""
    with _printing:
        print(f"{'' if line.startswith('  ') else LAUNCHER}{printable(line)}", file=sys.stderr, flush=True)


def log_file(directory: Path, rank: int) -> Path:
    """Returns the path of the log of a rank."""
    return directory / f"rank-{rank}.log"


class Log:
    """Appends every byte that a rank prints to a file; several threads may write.

    The run does not depend on its logs. If the file cannot be written, a warning is printed once, and the number of
    lost bytes is noted in the log as soon as it can be written again.
    """

    def __init__(self, path: Path) -> None:
        """Prepares a log; the file is opened by the first `write`."""
        self._path = path
        self._file: FileIO | None = None
        self._has_warned = False
        self._lost = 0
        self._lock = threading.Lock()

    def write(self, data: bytes) -> None:
        """Appends bytes, or counts them as lost; raises nothing."""
        written = 0
        with self._lock:
            try:
                self._file = self._file or FileIO(self._path, "ab", opener=_open_without_blocking)
                if self._lost:
                    self._file.write(f"\n--- {self._lost:,} bytes are missing here ---\n".encode())
                    self._lost = 0
                written = self._file.write(data) or 0
            except OSError as error:
                if not self._has_warned:
                    self._has_warned = True
                    announce(f"{self._path} cannot be written: {error.strerror}. The run continues without this log.")
            self._lost += len(data) - written

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            if self._file:
                self._file.close()
            self._file = None


def _open_without_blocking(path: str, flags: int) -> int:
    """Opens a file; a pipe in its place must not block the launcher, and the target of a link is not the run's."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0), 0o644)


class MutableWriter:
    """Prints the lines of one process to a stream until it is muted; ignores a stream that is full or closed."""

    def __init__(self, stream: Any, *, is_stderr: bool = False) -> None:
        self.is_muted = False
        self.is_stderr = is_stderr
        self._stream = stream

    def isatty(self) -> bool:
        """Returns whether the stream is a terminal."""
        return self._stream is not None and self._stream.isatty()

    def write(self, text: str) -> None:
        """Prints whole lines."""
        if self.is_muted or self._stream is None:
            return
        with _printing, suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()


class Relay:
    """Copies the bytes that a process prints to its log, and its lines to a writer.

    The writer gets neither Gloo's greetings nor characters that move the cursor. Lines that begin with MARK (the error
    message of a process that fails) are only kept in `tail`: the summary prints them.

    Args:
        rank: The rank that is printed before each line, in color on a terminal.
        log: The log of the rank.
        tail: Collects the last lines for the summary.
        writer: Prints the lines.
    """

    def __init__(self, rank: int, log: Log, tail: deque[str], writer: MutableWriter) -> None:
        self._log = log
        self._tail = tail
        self._writer = writer
        is_plain = not writer.isatty() or os.environ.get("NO_COLOR")
        self._prefix = f"[{rank}]" if is_plain else f"\033[{COLORS[rank % len(COLORS)]}m[{rank}]{RESET}"
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._pending, self._is_piece = b"", False

    def feed(self, chunk: bytes) -> None:
        """Copies some bytes; the last line is held back until it ends or becomes too long."""
        whole, newline, rest = (self._pending + chunk).rpartition(b"\n")
        self._log.write(_remove_marks(whole + newline))
        if newline and (whole or not self._is_piece):
            self._show(self._decoder.decode(whole))
        self._is_piece = self._is_piece and not newline
        if len(rest) > MAX_PENDING_BYTES:
            self._log.write(rest)
            self._show(self._decoder.decode(rest))
            rest, self._is_piece = b"", True
        self._pending = rest

    def finish(self) -> None:
        """Copies the last line if it does not end with a newline."""
        self._log.write(_remove_marks(self._pending))
        if self._pending:
            self._show(self._decoder.decode(self._pending, final=True))

    def _show(self, block: str) -> None:
        if MARK in block:
            lines, shown = [], []
            for line in block.split("\n"):
                cleaned = clean_lines(line.removeprefix(MARK))
                lines += cleaned
                shown += [] if line.startswith(MARK) else cleaned
        else:
            lines = shown = clean_lines(block)
        self._tail.extend(line[:MAX_TAIL_CHARACTERS] for line in lines[-MAX_TAIL_LINES:])
        if shown:
            self._writer.write("".join(f"{self._prefix} {line}\n" for line in shown))


def _remove_marks(text: bytes) -> bytes:
    return MARKS.sub(b"", text) if MARK.encode() in text else text


def relay(pipe: BinaryIO, rank: int, log: Log, tail: deque[str], writer: MutableWriter) -> None:
    """Copies the output of a process until its pipe closes; see `Relay`."""
    with pipe:
        copying = Relay(rank, log, tail, writer)
        while chunk := pipe.read1(CHUNK_BYTES):  # pyright: ignore[reportAttributeAccessIssue]  (a buffered pipe)
            copying.feed(chunk)
        copying.finish()


class TaggedOutput:
    """Separates the output of many ranks that mpirun writes into one stream, with a tag before each piece.

    mpirun tags pieces in the middle of a line too. The pieces of each rank are joined again, so that its log contains
    exactly the bytes that it printed.

    Args:
        logs: The directory of the logs.
        num_ranks: The number of ranks.
        name: The program that writes the stream. Its own lines are shown after this name, and kept in `name`.log.
    """

    def __init__(self, logs: Path, num_ranks: int, name: str) -> None:
        self._logs = logs
        self._name = name
        self._out = [deque[str](maxlen=MAX_TAIL_LINES) for _ in range(num_ranks)]
        self._err = [deque[str](maxlen=MAX_TAIL_LINES) for _ in range(num_ranks)]
        self.own: deque[str] = deque(maxlen=MAX_TAIL_LINES)
        """The last lines of the program itself."""

    @property
    def tails(self) -> tuple[list[str], ...]:
        """The last lines of each rank: from its stderr, or from its stdout if that is empty."""
        return tuple(list(err or out) for out, err in zip(self._out, self._err, strict=True))

    def __call__(self, pipe: BinaryIO, rank: int, log: Log, tail: deque[str], writer: MutableWriter) -> None:
        """Copies the output of all ranks until the pipe closes; takes the arguments of `relay`."""
        tails = self._err if writer.is_stderr else self._out
        logs, relays = {0: log}, dict[int, Relay]()
        with pipe:
            for line in pipe:
                for number, piece in split_at_tags(line):
                    if number is None or number >= len(tails):
                        self._show_own(piece, writer)
                        continue
                    if number not in relays:
                        log = logs.setdefault(number, Log(log_file(self._logs, number)))
                        relays[number] = Relay(number, log, tails[number], writer)
                    relays[number].feed(piece)
            for number, each in relays.items():
                each.finish()
                if number:
                    logs[number].close()

    def _show_own(self, piece: bytes, writer: MutableWriter) -> None:
        """Prints and keeps a line of the program itself, unless it is a rule or blank."""
        line = piece.decode(errors="replace").rstrip("\r\n")
        if RULE.fullmatch(line):
            return
        self.own.append(line)
        writer.write(f"[{self._name}] {clean(line) or ''}\n")
        with closing(Log(self._logs / f"{self._name}.log")) as log:
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n".encode())


def split_at_tags(line: bytes) -> Iterator[tuple[int | None, bytes]]:
    """Yields the rank and the text of each tagged piece of a line; the rank is None before the first tag."""
    before, *rest = TAG.split(line)  # for each tag, its two groups, of which one is None, and the piece after it
    if before:
        yield None, before
    for first, second, piece in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
        if piece:
            yield int(first or second), piece


def clean_lines(block: str) -> list[str]:
    """Returns the lines of a text as they are shown; see `clean`."""
    lines = block.split("\n")
    if "[Gloo]" not in block and "peer ranks" not in block and not HIDDEN.search(block):
        return lines
    return [text for text in map(clean, lines) if text is not None]


def clean(line: str) -> str | None:
    """Returns a line as it is shown, without Gloo's greeting; None if nothing is left.

    If a line is overwritten several times, like a progress bar, the last state is shown. Colors are kept; other control
    characters are escaped.
    """
    text = line.rstrip("\r\n").rpartition("\r")[2]
    if "[Gloo]" in text or "peer ranks" in text:
        text = GLOO_PIECES.sub("", text)
        if not text.strip():
            return None
    if not HIDDEN.search(text):
        return text
    parts = COLOR.split(text)
    shown = "".join(part if number % 2 else printable(part) for number, part in enumerate(parts))
    return f"{shown}{RESET}" if len(parts) > 1 and not shown.endswith(RESET) else shown


def last_words(lines: list[str], limit: int = 20, max_lines: int = 200) -> list[str]:
    """Returns the lines to repeat of a process that failed: its last traceback or error, or else its last lines.

    Args:
        lines: The end of its output.
        limit: The number of lines if they contain no error.
        max_lines: The maximum length of an error; the middle of a longer one is omitted.
    """
    starts = [number for number, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    errors = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    start = max([*starts, *errors[-1:]], default=max(0, len(lines) - limit))
    words = [printable(COLOR.sub("", line)) for line in lines[start:]]
    return words if len(words) <= max_lines else [words[0], "  ...", *words[2 - max_lines :]]
