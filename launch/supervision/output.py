"""What the processes of a run print: one stream, each line after its rank, and one log file per rank."""

import os
import re
import threading
from collections import deque
from pathlib import Path
from typing import BinaryIO, TextIO

COLOURS = (36, 33, 35, 32, 34, 31)
GLOO_PIECES = re.compile(
    r"\[Gloo\] Rank \d*| ?\d* is connected to \d*| ?\d* peer ranks\. "
    r"| ?Expected number of connected peer ranks is : \d*"
)
"""Its greeting in the pieces it is written in: the threads of a process write over each other."""
TAIL_LINES = 400


def log_file(folder: Path, rank: int) -> Path:
    """Returns where the output of a rank is kept."""
    return folder / f"rank-{rank}.log"


def relay(pipe: BinaryIO, rank: int, log: BinaryIO, tail: deque[str], out: TextIO, turn: threading.Lock) -> None:
    """Copies lines from a process to the terminal and to its log until the pipe closes.

    Args:
        pipe: Its stdout or stderr.
        rank: Put before each line, in the rank's colour on a terminal.
        log: Gets every byte as it is; unbuffered.
        tail: Gets each line, for the summary of a failure.
        out: Gets each line after its rank, without Gloo's greetings.
        turn: Held while a line is written, so that lines of several processes do not mix.
    """
    prefix = _prefix(rank, out)
    with pipe:
        for raw in pipe:
            log.write(raw)
            line = clean(raw.decode(errors="replace"))
            if line is None:
                continue
            tail.append(line)
            with turn:
                print(f"{prefix} {line}", file=out, flush=True)


def clean(line: str) -> str | None:
    """Returns a line without its end and without what Gloo prints at start; None where nothing is left of it."""
    text = line.rstrip("\r\n")
    if "[Gloo]" not in text and "peer ranks" not in text:
        return text
    wanted = GLOO_PIECES.sub("", text)
    return wanted if wanted.strip() else None


def last_words(lines: list[str], limit: int = 20) -> list[str]:
    """Returns the lines worth repeating of a process that failed: its last traceback, or else its last lines."""
    starts = [number for number, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    errors = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    start = max([*starts, *errors[-1:]], default=max(0, len(lines) - limit))
    words = lines[start:]
    return words if len(words) <= limit else [words[0], "  ...", *words[2 - limit :]]


def _prefix(rank: int, out: TextIO) -> str:
    if not out.isatty() or os.environ.get("NO_COLOR"):
        return f"[{rank}]"
    return f"\033[{COLOURS[rank % len(COLOURS)]}m[{rank}]\033[0m"
