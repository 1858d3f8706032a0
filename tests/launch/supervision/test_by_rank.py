"""Output of several ranks in one stream is that of each rank again."""

import io
import os
from collections import deque
from contextlib import closing

import pytest
from spmdkit.launch.supervision.by_rank import ByRank, pieces
from spmdkit.launch.supervision.logs import Log
from spmdkit.launch.supervision.output import log_file
from spmdkit.launch.supervision.terminal import Terminal


def relayed(tmp_path, raw: bytes, stream) -> tuple[ByRank, str]:
    """What is printed of a stream; the logs are in tmp_path."""
    read, write = os.pipe()
    os.write(write, raw)
    os.close(write)
    output = ByRank(tmp_path, 2, "mpirun")
    out = io.StringIO()
    terminal = Terminal(out, is_stderr=stream == "stderr")
    with closing(Log(log_file(tmp_path, 0), print)) as log, os.fdopen(read, "rb") as pipe:
        output(pipe, 0, log, deque(), terminal)
    terminal.close(5)
    return output, out.getvalue()


def test_pieces_of_a_line():
    raw = b"[14779,1]<stdout>:no newline 1[14779,0]<stdout>:0\n"
    assert list(pieces(raw)) == [(1, b"no newline 1"), (0, b"0\n")]
    assert list(pieces(b"its own\n")) == [(None, b"its own\n")]
    assert list(pieces(b"own[1,10]<stderr>:ten\n")) == [(None, b"own"), (10, b"ten\n")]
    assert list(pieces(b"[prterun-vm-7@1,3]<stdout>: three\n")) == [(3, b"three\n")]
    assert list(pieces(b"[1,0]<stdout>:\n")) == [(0, b"\n")]


def test_logs_hold_every_byte(tmp_path):
    """Pieces of a long line, and lines that two ranks wrote at once, are joined again."""
    long = b"x" * 4000
    raw = b"[1,0]<stdout>:" + long + b"[1,1]<stdout>:\xff between\n[1,0]<stdout>:" + long + b" end\n"
    raw += b"[1,1]<stdout>:last, without a newline"
    output, printed = relayed(tmp_path, raw, "stdout")
    assert log_file(tmp_path, 0).read_bytes() == long + long + b" end\n"
    assert log_file(tmp_path, 1).read_bytes() == b"\xff between\nlast, without a newline"
    assert sorted(printed.splitlines()) == sorted(
        [f"[0] {'x' * 8000} end", "[1] \ufffd between", "[1] last, without a newline"]
    )
    assert output.tails[1] == ["\ufffd between", "last, without a newline"]


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_its_own_words_are_kept_apart(stream, tmp_path):
    raw = b"[1,0]<stderr>:words of rank 0\n-----------\nThere are not enough slots\n\n[7,0]<stderr>:more\n"
    output, printed = relayed(tmp_path, raw, stream)
    assert list(output.own) == ["There are not enough slots"]
    assert "[mpirun] There are not enough slots\n" in printed
    assert (tmp_path / "mpirun.log").read_text().endswith(" There are not enough slots\n")
    assert output.tails == (["words of rank 0", "more"], [])
