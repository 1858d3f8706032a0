"""The output of many ranks that comes in one stream, as mpirun gives it: taken apart, and relayed rank by rank.

With `--tag-output` mpirun puts a tag before each piece of output, in the middle of a line too where a process did not
write the line at once. Each rank's pieces are joined again, so that its log holds every byte as it was.
"""

import os
import re
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import BinaryIO, cast

from .logs import Log
from .output import TAIL_LINES, clean, log_file, relay
from .terminal import SAYS, Terminal, Voice

TAG = re.compile(rb"\[\d+,(\d+)\]<std(?:out|err|diag)>:|\[[^\s\[\]]*@\d+,(\d+)\]<std(?:out|err|diag)>: ?")
"""Open MPI 4: `[14779,1]<stdout>:`; 5: `[prterun-host-14779@1,1]<stdout>: `."""
RULE = re.compile(r"-*\s*")


class ByRank:
    """What several ranks print, relayed to the terminal and to a log of each."""

    def __init__(self, logs: Path, num_ranks: int, name: str) -> None:
        """Prepares for output.

        Args:
            logs: Folder of the logs.
            num_ranks: How many ranks there are.
            name: Of the process whose streams these are; its own words are shown after it and kept in `name`.log.
        """
        self._logs = logs
        self._name = name
        self._out = [deque[str](maxlen=TAIL_LINES) for _ in range(num_ranks)]
        self._err = [deque[str](maxlen=TAIL_LINES) for _ in range(num_ranks)]
        self.own: deque[str] = deque(maxlen=TAIL_LINES)
        """The last lines that are of no rank."""

    @property
    def tails(self) -> tuple[list[str], ...]:
        """The last lines of each rank: of its stderr, or of its stdout where that is empty."""
        return tuple(list(err or out) for out, err in zip(self._out, self._err, strict=True))

    def __call__(self, pipe: BinaryIO, rank: int, log: Log, tail: deque[str], terminal: Terminal | Voice) -> None:
        """Does for a stream of several ranks what `relay` does for that of one; takes the same arguments."""
        del rank, tail
        tails = self._err if terminal.is_stderr else self._out
        with pipe, ExitStack() as stack:
            feeds: dict[int, BinaryIO] = {}
            for raw in pipe:
                for number, piece in pieces(raw):
                    if number is None or number >= len(tails):
                        self._tell(piece, terminal)
                        continue
                    if number not in feeds:
                        feeds[number] = self._feed(number, log, tails[number], terminal, stack)
                    feeds[number].write(piece)

    def _feed(self, rank: int, log: Log, tail: deque[str], terminal: Terminal | Voice, stack: ExitStack) -> BinaryIO:
        """Starts the relay of one rank; what is written into the file it gives is its output."""
        read, write = os.pipe()
        if rank > 0:
            log = stack.enter_context(closing(self._log(log_file(self._logs, rank), terminal)))
        pipe = cast(BinaryIO, os.fdopen(read, "rb"))
        thread = threading.Thread(target=relay, args=(pipe, rank, log, tail, terminal), daemon=True)
        thread.start()
        stack.callback(thread.join)
        return cast(BinaryIO, stack.enter_context(os.fdopen(write, "wb", buffering=0)))

    def _log(self, path: Path, terminal: Terminal | Voice) -> Log:
        return Log(path, lambda line: terminal.write(f"{SAYS}{line}\n"))

    def _tell(self, piece: bytes, terminal: Terminal | Voice) -> None:
        """Prints and keeps a line that is of no rank, but for rules and blank ones."""
        line = piece.decode(errors="replace").rstrip("\r\n")
        if RULE.fullmatch(line):
            return
        self.own.append(line)
        terminal.write(f"[{self._name}] {clean(line) or ''}\n")
        with closing(self._log(self._logs / f"{self._name}.log", terminal)) as log:
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n".encode())


def pieces(raw: bytes) -> Iterator[tuple[int | None, bytes]]:
    """Takes a line apart at its tags: the rank of each piece, None before the first tag, and the piece."""
    tags = list(TAG.finditer(raw))
    begin = tags[0].start() if tags else len(raw)
    if begin:
        yield None, raw[:begin]
    ends = [following.start() for following in tags[1:]] + [len(raw)]
    for tag, end in zip(tags, ends, strict=False):
        piece = raw[tag.end() : end]
        if piece:
            yield int(tag[1] or tag[2]), piece
