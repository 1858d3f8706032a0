import io
from collections import deque

import pytest
from spmdkit.launch.supervision.logs import Log
from spmdkit.launch.supervision.output import LONGEST, TAIL_CHARACTERS, TAIL_LINES, clean, last_words, relay
from spmdkit.launch.supervision.terminal import Terminal
from spmdkit.training.ending.exits import MARK

GLOO = "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1"


class Looked(io.StringIO):
    """A stream that says that somebody looks at it."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def relayed(tmp_path):
    """Relays bytes; gives what was shown, logged and kept for the summary."""

    def relayed(data: bytes, rank: int = 3, out: io.StringIO | None = None) -> tuple[str, bytes, list[str]]:
        out, log, tail = out or io.StringIO(), Log(tmp_path / "log", print), deque(maxlen=TAIL_LINES)
        terminal = Terminal(out)
        relay(io.BufferedReader(io.BytesIO(data)), rank, log, tail, terminal)  # pyright: ignore
        terminal.close(5)
        log.close()
        return out.getvalue(), (tmp_path / "log").read_bytes(), list(tail)

    return relayed


def test_lines_come_after_their_rank_and_are_kept(relayed):
    out, log, tail = relayed(b"one\ntwo\n\nno end")
    assert out == "[3] one\n[3] two\n[3] \n[3] no end\n"
    assert log == b"one\ntwo\n\nno end"
    assert tail == ["one", "two", "", "no end"]


def test_last_words_are_kept_and_not_shown(relayed):
    out, log, tail = relayed(f"one\n{MARK}error: no\n{MARK}  in a.yaml\x07\ntwo{MARK}\n{MARK}no end".encode())
    assert out == "[3] one\n[3] two\\x02\\x02\n"
    assert log == f"one\nerror: no\n  in a.yaml\x07\ntwo{MARK}\nno end".encode()
    assert tail == ["one", "error: no", "  in a.yaml\\x07", "two\\x02\\x02", "no end"]


def test_gloo_is_left_out_but_logged(relayed):
    out, log, _ = relayed(f"{GLOO}\nloss 3{GLOO}\n".encode())
    assert out == "[3] loss 3\n"
    assert log.decode().count(GLOO) == 2


def test_bytes_that_are_no_text(relayed):
    data = bytes(range(256)) * 1000
    out, log, _ = relayed(data)
    assert log == data
    assert relayed(b"\xff\n")[0] == "[3] \ufffd\n"
    assert not set(out) & {chr(code) for code in (*range(9), *range(0xB, 0x20), 0x7F)}


def test_colour_on_a_terminal_only(relayed, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert relayed(b"x\n", 1, Looked())[0] == "\033[33m[1]\033[0m x\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert relayed(b"x\n", 1, Looked())[0] == "[1] x\n"


def test_a_line_without_end_comes_in_pieces(relayed):
    data = "é".encode() * 300_000  # of two bytes: no piece may cut one in half
    out, log, tail = relayed(data)
    pieces = out.splitlines()
    assert log == data
    assert "".join(piece.removeprefix("[3] ") for piece in pieces) == "é" * 300_000
    assert len(pieces) > 3
    assert min(map(len, pieces[:-1])) > LONGEST
    assert max(map(len, tail)) == TAIL_CHARACTERS


def test_many_lines_keep_the_last(relayed):
    out, _, tail = relayed(b"".join(b"%d\n" % number for number in range(100_000)))
    assert out.count("\n") == 100_000
    assert (tail[0], tail[-1], len(tail)) == (str(100_000 - TAIL_LINES), "99999", TAIL_LINES)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("a\r\n", "a"),
        ("\n", ""),
        (GLOO + "\n", None),
        ("a" + GLOO, "a"),
        ("[Gloo] Rank " + GLOO, None),  # two threads
        ("1 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1\n", None),
        ("worker 1 is connected to 3 hosts", "worker 1 is connected to 3 hosts"),
        (" 10 %|#   |\r 20 %|##  |\r", " 20 %|##  |"),
        ("\x1b[31mred\x1b[0m \x1b[1;32mgreen\x1b[0m", "\x1b[31mred\x1b[0m \x1b[1;32mgreen\x1b[0m"),
        ("\x1b[31mred for ever", "\x1b[31mred for ever\x1b[0m"),
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("run\u202eseed", "run\\u202eseed"),
    ],
)
def test_clean(line, expected):
    assert clean(line) == expected


def test_last_words_are_the_last_traceback():
    lines = [
        "step 1",
        "Traceback (most recent call last):",
        "  old",
        "A: a",
        "Traceback (most recent call last):",
        "B: b",
    ]
    assert last_words(lines) == lines[4:]


def test_last_words_are_a_users_error():
    assert last_words(["step 1", "error: 2 problems in a.yaml:", "  line 1"]) == [
        "error: 2 problems in a.yaml:",
        "  line 1",
    ]


def test_last_words_cannot_change_the_terminal():
    assert last_words(["\x1b[31merror: \x1b[0m in \x1b[2Jyours", "\x07"]) == ["error:  in \\x1b[2Jyours", "\\x07"]


def test_last_words_without_a_traceback():
    assert last_words([str(number) for number in range(50)]) == [str(number) for number in range(30, 50)]


def test_long_tracebacks_keep_both_ends():
    whole = ["Traceback (most recent call last):", *map(str, range(190)), "E: e"]
    assert last_words(whole) == whole
    words = last_words([*whole, *whole[1:]])
    assert (words[0], words[1], words[-1], len(words)) == ("Traceback (most recent call last):", "  ...", "E: e", 200)
