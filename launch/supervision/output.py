"""What the processes of a run print: one stream, each line after its rank, and one log file per rank."""

import codecs
import os
import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ...mesh.text import printable
from ...training.ending.exits import MARK
from .logs import Log
from .terminal import Terminal, Voice

COLOURS = (36, 33, 35, 32, 34, 31)
GLOO_PIECES = re.compile(
    r"\[Gloo\] Rank \d*| ?\d* is connected to \d*| ?\d* peer ranks\. "
    r"| ?Expected number of connected peer ranks is : \d*"
)
"""Its greeting in the pieces it is written in: the threads of a process write over each other."""
COLOUR = re.compile(r"(\x1b\[[0-9;:]*m)")
PLAIN = "\x1b[0m"
HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2028\u2029\u2066-\u2069]")
"""Most of what `printable` writes as an escape: what a line is looked through for."""
CHUNK = 1 << 16
"""Bytes that are read at once."""
LONGEST = 1 << 13
"""Characters after which a line without end is shown so far."""
MARKS = re.compile(rb"(?m)^" + MARK.encode())
TAIL_LINES = 400
TAIL_CHARACTERS = 2000
"""Of each of these lines."""


def log_file(folder: Path, rank: int) -> Path:
    """Returns where the output of a rank is kept."""
    return folder / f"rank-{rank}.log"


def relay(pipe: BinaryIO, rank: int, log: Log, tail: deque[str], terminal: Terminal | Voice) -> None:
    """Copies what a process prints to its log, and its lines to the terminal, until the pipe closes.

    It waits for neither of them: the process would wait for it.

    Args:
        pipe: Its stdout or stderr.
        rank: Put before each line, in the rank's colour on a terminal.
        log: Gets every byte as it is.
        tail: Gets each line, for the summary of a failure.
        terminal: Gets each line after its rank, without Gloo's greetings and what would move the cursor; and without
            last words, which the summary shows.
    """
    prefix = _prefix(rank, terminal)
    with pipe:
        for block in _blocks(pipe, log):
            lines, shown = _with_last_words(block) if MARK in block else (shown_lines(block),) * 2
            tail.extend(line[:TAIL_CHARACTERS] for line in lines[-TAIL_LINES:])
            if shown:
                terminal.write("".join([f"{prefix} {line}\n" for line in shown]))


def _with_last_words(block: str) -> tuple[list[str], list[str]]:
    """The lines of a text that holds last words, and those that are none."""
    lines: list[str] = []
    shown: list[str] = []
    for line in block.split("\n"):
        found = shown_lines(line.removeprefix(MARK))
        lines += found
        shown += [] if line.startswith(MARK) else found
    return lines, shown


def _blocks(pipe: BinaryIO, log: Log) -> Iterator[str]:
    """Whole lines, as many as come together; a line without end comes in pieces."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    rest, in_pieces = b"", False
    while chunk := pipe.read1(CHUNK):  # pyright: ignore[reportAttributeAccessIssue]  (of a buffered pipe)
        whole, newline, rest = (rest + chunk).rpartition(b"\n")
        log.write(_unmarked(whole + newline))
        if newline and (whole or not in_pieces):
            yield decoder.decode(whole)
        in_pieces = in_pieces and not newline
        if len(rest) > LONGEST:
            log.write(rest)
            yield decoder.decode(rest)
            rest, in_pieces = b"", True
    log.write(_unmarked(rest))
    if rest:
        yield decoder.decode(rest, final=True)


def _unmarked(text: bytes) -> bytes:
    return MARKS.sub(b"", text) if MARK.encode() in text else text


def shown_lines(block: str) -> list[str]:
    """The lines of a text as the terminal gets them; see `clean`."""
    lines = block.split("\n")
    if "[Gloo]" not in block and "peer ranks" not in block and not HIDDEN.search(block):
        return lines
    return [text for text in map(clean, lines) if text is not None]


def clean(line: str) -> str | None:
    """Returns a line as it may be shown, without what Gloo prints at start; None where nothing is left of it.

    Of a line that is written over and over, such as a progress bar's, the last is what a terminal would show. Colours
    stay; other control characters are written as escapes.
    """
    text = line.rstrip("\r\n").rpartition("\r")[2]
    if "[Gloo]" in text or "peer ranks" in text:
        text = GLOO_PIECES.sub("", text)
        if not text.strip():
            return None
    if not HIDDEN.search(text):
        return text
    parts = COLOUR.split(text)
    shown = "".join(part if number % 2 else printable(part) for number, part in enumerate(parts))
    return f"{shown}{PLAIN}" if len(parts) > 1 and not shown.endswith(PLAIN) else shown


def last_words(lines: list[str], limit: int = 20, most: int = 200) -> list[str]:
    """Returns the lines worth repeating of a process that failed: its last traceback, or else its last lines.

    Args:
        lines: What it printed at the end.
        limit: How many of the last lines, where no error begins among them.
        most: Lines of an error; of a longer one the middle is left out.
    """
    starts = [number for number, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    errors = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    start = max([*starts, *errors[-1:]], default=max(0, len(lines) - limit))
    words = [printable(COLOUR.sub("", line)) for line in lines[start:]]
    return words if len(words) <= most else [words[0], "  ...", *words[2 - most :]]


def _prefix(rank: int, terminal: Terminal | Voice) -> str:
    if not terminal.isatty() or os.environ.get("NO_COLOR"):
        return f"[{rank}]"
    return f"\033[{COLOURS[rank % len(COLOURS)]}m[{rank}]\033[0m"
