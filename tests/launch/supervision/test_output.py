import io
import threading
from collections import deque

import pytest
from spmdkit.launch.supervision.output import clean, last_words, relay

GLOO = "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def relayed(data: bytes, out: io.StringIO, rank: int = 3) -> tuple[str, bytes, list[str]]:
    log, tail = io.BytesIO(), deque()
    relay(io.BytesIO(data), rank, log, tail, out, threading.Lock())
    return out.getvalue(), log.getvalue(), list(tail)


def test_lines_come_after_their_rank_and_are_kept():
    out, log, tail = relayed(b"one\ntwo\nno end", io.StringIO())
    assert out == "[3] one\n[3] two\n[3] no end\n"
    assert log == b"one\ntwo\nno end"
    assert tail == ["one", "two", "no end"]


def test_gloo_is_left_out_but_logged():
    out, log, _ = relayed(f"{GLOO}\nloss 3{GLOO}\n".encode(), io.StringIO())
    assert out == "[3] loss 3\n"
    assert log.decode().count(GLOO) == 2


def test_bytes_that_are_no_text():
    assert relayed(b"\xff\n", io.StringIO())[0] == "[3] \ufffd\n"


def test_colour_on_a_terminal_only(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert relayed(b"x\n", Terminal(), rank=1)[0] == "\033[33m[1]\033[0m x\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert relayed(b"x\n", Terminal(), rank=1)[0] == "[1] x\n"


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


def test_last_words_without_a_traceback():
    assert last_words([str(number) for number in range(50)]) == [str(number) for number in range(30, 50)]


def test_long_tracebacks_keep_both_ends():
    words = last_words(["Traceback (most recent call last):", *map(str, range(50)), "E: e"])
    assert (words[0], words[1], words[-1], len(words)) == ("Traceback (most recent call last):", "  ...", "E: e", 20)
