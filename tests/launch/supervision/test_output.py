"""Relayed output, logs of ranks, and output with tags."""

import io
import os
from collections import deque
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
from spmdkit.launch.supervision import workers
from spmdkit.launch.supervision.output import (
    MAX_PENDING_BYTES,
    MAX_TAIL_CHARACTERS,
    MAX_TAIL_LINES,
    Log,
    MutableWriter,
    TaggedOutput,
    clean,
    last_words,
    log_file,
    relay,
    split_at_tags,
)
from spmdkit.mesh.known_causes import MARK

GLOO = "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1"
OF_A_LIBRARY = "warning: waiting for peer ranks 3 and 4 of my own library"


class Looked(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def relayed(tmp_path):
    """Relays bytes; gives what was shown, logged and kept for the summary."""

    def relayed(data: bytes, rank: int = 3, out: io.StringIO | None = None) -> tuple[str, bytes, list[str]]:
        out, log, tail = out or io.StringIO(), Log(tmp_path / "log"), deque(maxlen=MAX_TAIL_LINES)
        writer = MutableWriter(out)
        relay(io.BufferedReader(io.BytesIO(data)), rank, log, tail, writer)  # pyright: ignore
        log.close()
        return out.getvalue(), (tmp_path / "log").read_bytes(), list(tail)

    return relayed


def test_relay_prints_ranks_and_keeps_lines(relayed):
    out, log, tail = relayed(b"one\ntwo\n\nno end")
    assert out == "[3] one\n[3] two\n[3] \n[3] no end\n"
    assert log == b"one\ntwo\n\nno end"
    assert tail == ["one", "two", "", "no end"]


def test_marked_lines_are_kept_but_not_printed(relayed):
    out, log, tail = relayed(f"one\n{MARK}error: no\n{MARK}  in a.yaml\x07\ntwo{MARK}\n{MARK}no end".encode())
    assert out == "[3] one\n[3] two\\x02\\x02\n"
    assert log == f"one\nerror: no\n  in a.yaml\x07\ntwo{MARK}\nno end".encode()
    assert tail == ["one", "error: no", "  in a.yaml\\x07", "two\\x02\\x02", "no end"]


def test_gloo_greetings_are_only_logged(relayed):
    out, log, _ = relayed(f"{GLOO}\nloss 3{GLOO}\n".encode())
    assert out == "[3] loss 3\n"
    assert log.decode().count(GLOO) == 2


def test_relay_of_binary_output(relayed):
    data = bytes(range(256)) * 1000
    out, log, _ = relayed(data)
    assert log == data
    again, log, _ = relayed(b"\xff\n")
    assert (again, log) == ("[3] \ufffd\n", data + b"\xff\n"), "the log is extended"
    assert relayed("é".encode()[:1])[0] == "[3] \ufffd\n", "the end was cut"
    assert not set(out) & {chr(code) for code in (*range(9), *range(0xB, 0x20), 0x7F)}


def test_colour_on_a_terminal_only(relayed, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert relayed(b"x\n", 1, Looked())[0] == "\033[33m[1]\033[0m x\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert relayed(b"x\n", 1, Looked())[0] == "[1] x\n"


def test_endless_line_is_printed_in_pieces(relayed):
    data = "é".encode() * 300_000  # of two bytes: no piece may cut one in half
    out, log, tail = relayed(data)
    pieces = out.splitlines()
    assert log == data
    assert "".join(piece.removeprefix("[3] ") for piece in pieces) == "é" * 300_000
    assert len(pieces) > 3
    assert min(map(len, pieces[:-1])) > MAX_PENDING_BYTES
    assert max(map(len, tail)) == MAX_TAIL_CHARACTERS


def test_tail_keeps_the_last_lines(relayed):
    out, _, tail = relayed(b"".join(b"%d\n" % number for number in range(100_000)))
    assert out.count("\n") == 100_000
    assert (tail[0], tail[-1], len(tail)) == (str(100_000 - MAX_TAIL_LINES), "99999", MAX_TAIL_LINES)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("a\r\n", "a"),
        (GLOO + "\n", None),
        ("a" + GLOO, "a"),
        ("[Gloo] Rank " + GLOO, None),  # two threads
        ("1 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1\n", None),
        (GLOO + "error: no data", "error: no data"),  # a thread of the program
        ("worker 1 is connected to 3 hosts", "worker 1 is connected to 3 hosts"),
        (OF_A_LIBRARY, OF_A_LIBRARY),
        (" 10 %|#   |\r 20 %|##  |\r", " 20 %|##  |"),
        ("\x1b[31mred\x1b[0m \x1b[1;32mgreen\x1b[0m", "\x1b[31mred\x1b[0m \x1b[1;32mgreen\x1b[0m"),
        ("\x1b[31mred for ever", "\x1b[31mred for ever\x1b[0m"),
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("run\u202eseed", "run\\u202eseed"),
    ],
)
def test_clean(line, expected):
    assert clean(line) == expected


TRACEBACK = "Traceback (most recent call last):"
LONG = [TRACEBACK, *map(str, range(190)), "E: e"]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["step 1", TRACEBACK, "A: a", TRACEBACK, "B: b"], [TRACEBACK, "B: b"]),
        (["step 1", "error: 2 problems:", "  line 1"], ["error: 2 problems:", "  line 1"]),
        (["\x1b[31merror: \x1b[0m in \x1b[2Jyours", "\x07"], ["error:  in \\x1b[2Jyours", "\\x07"]),
        ([str(number) for number in range(50)], [str(number) for number in range(30, 50)]),
        (LONG, LONG),
        ([*LONG, *LONG[1:]], [TRACEBACK, "  ...", *[*LONG, *LONG[1:]][-198:]]),
    ],
)
def test_last_words_are_the_last_error_or_the_last_lines(lines, words):
    assert last_words(lines) == words


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_log_warns_once_if_it_cannot_be_written(make, tmp_path, capsys):
    path = tmp_path / "a.log"
    make(path)
    log = Log(path)
    for _ in range(3):
        log.write(b"line\n")
    log.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"spmdkit launch: {path} cannot be written: ")
    assert line.endswith("The run continues without this log.")


def test_log_notes_missing_bytes(tmp_path):
    path = tmp_path / "logs" / "a.log"
    log = Log(path)
    log.write(b"lost\n")
    log.write(b"lost too\n")
    path.parent.mkdir()
    log.write(b"kept\n")
    log.write(b"and this\n")
    log.close()
    assert path.read_bytes() == b"\n--- 14 bytes are missing here ---\nkept\nand this\n"


def copied(tmp_path, raw: bytes, stream) -> tuple[TaggedOutput, str]:
    """What is printed of a stream; the logs are in tmp_path."""
    read, write = os.pipe()
    os.write(write, raw)
    os.close(write)
    output = TaggedOutput(tmp_path, 2, "mpirun")
    out = io.StringIO()
    writer = MutableWriter(out, is_stderr=stream == "stderr")
    with closing(Log(log_file(tmp_path, 0))) as log, os.fdopen(read, "rb") as pipe:
        output(pipe, 0, log, deque(), writer)
    return output, out.getvalue()


def test_split_at_tags():
    raw = b"[14779,1]<stdout>:no newline 1[14779,0]<stdout>:0\n"
    assert list(split_at_tags(raw)) == [(1, b"no newline 1"), (0, b"0\n")]
    assert list(split_at_tags(b"its own\n")) == [(None, b"its own\n")]
    assert list(split_at_tags(b"own[1,10]<stderr>:ten\n")) == [(None, b"own"), (10, b"ten\n")]
    assert list(split_at_tags(b"[prterun-vm-7@1,3]<stdout>: three\n")) == [(3, b"three\n")]
    assert list(split_at_tags(b"[1,0]<stdout>:\n")) == [(0, b"\n")]


def test_tagged_output_is_logged_by_rank(tmp_path):
    long = b"x" * 4000
    raw = b"[1,0]<stdout>:" + long + b"[1,1]<stdout>:\xff between\n[1,0]<stdout>:" + long + b" end\n"
    raw += b"[1,1]<stdout>:last, without a newline"
    output, printed = copied(tmp_path, raw, "stdout")
    assert log_file(tmp_path, 0).read_bytes() == long + long + b" end\n"
    assert log_file(tmp_path, 1).read_bytes() == b"\xff between\nlast, without a newline"
    assert sorted(printed.splitlines()) == sorted(
        [f"[0] {'x' * 8000} end", "[1] \ufffd between", "[1] last, without a newline"]
    )
    assert output.tails[1] == ["\ufffd between", "last, without a newline"]


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_tagged_output_keeps_own_lines(stream, tmp_path):
    raw = b"[1,0]<stderr>:words of rank 0\n-----------\nThere are not enough slots\n\n[7,0]<stderr>:more\n"
    output, printed = copied(tmp_path, raw, stream)
    assert list(output.own) == ["There are not enough slots"]
    assert "[mpirun] There are not enough slots\n" in printed
    assert (tmp_path / "mpirun.log").read_text().endswith(" There are not enough slots\n")
    assert output.tails == (["words of rank 0", "more"], [])


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("stream", [Full(), io.StringIO(), None])
def test_writer_ignores_a_stream_that_is_full_closed_or_missing(stream):
    if type(stream) is io.StringIO:
        stream.close()
    MutableWriter(stream).write("a\n")


def test_writer_prints_nothing_while_muted():
    out = io.StringIO()
    writer = MutableWriter(out)
    writer.write("a\n")
    writer.is_muted = True
    writer.write("b\n")
    assert out.getvalue() == "a\n"


def test_waits_for_the_last_output_of_all_processes_together(monkeypatch):
    """A program in the background may hold the outputs open; then the logs stay open too."""
    now, waits = [100.0], []

    def join(seconds):
        waits.append(seconds)
        now[0] += min(seconds, 1.5)

    monkeypatch.setattr(workers.time, "monotonic", lambda: now[0])
    worker: Any = SimpleNamespace(threads=[SimpleNamespace(join=join, is_alive=lambda: True)], log=None)
    workers.finish_reading([worker] * 3)
    assert waits == [2.0, 0.5, 0.0]
