import io
import threading
import time

import pytest
from spmdkit.launch.supervision.terminal import Screen, Terminal


class Stuck(io.StringIO):
    """A stream that stands still until it is let go."""

    def __init__(self):
        super().__init__()
        self.go, self.reached = threading.Event(), threading.Event()

    def write(self, text: str) -> int:
        self.reached.set()
        self.go.wait()
        return super().write(text)


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def test_what_is_written_comes_in_order():
    out = io.StringIO()
    terminal = Terminal(out)
    for number in range(1000):
        terminal.write(f"{number}\n")
    terminal.close(5)
    assert out.getvalue().split() == [str(number) for number in range(1000)]


def test_a_terminal_that_stands_still_holds_nobody_up():
    out = Stuck()
    terminal = Terminal(out, most=1000)
    terminal.write("first\n")
    assert out.reached.wait(5)
    begin = time.monotonic()
    for _ in range(5000):
        terminal.write("a line of twenty....\n")
    assert time.monotonic() - begin < 5
    out.go.set()
    terminal.close(5)
    lines = out.getvalue().splitlines()
    assert lines[0] == "first"
    kept = [line for line in lines if line == "a line of twenty...."]
    assert 40 < len(kept) < 48
    said = f"spmdkit launch: {5000 - len(kept):,} lines are left out here, this output is slower; the logs have them"
    assert lines[-1] == said


def test_it_says_what_is_left_out_where_it_goes_on():
    out = Stuck()
    terminal = Terminal(out, most=10)
    terminal.write("first one\n")
    assert out.reached.wait(5)
    terminal.write("lost\nlost\n")
    out.go.set()
    while terminal._size:
        time.sleep(0.01)
    terminal.write("later\n")
    terminal.close(5)
    first, said, later = out.getvalue().splitlines()
    assert (first, later) == ("first one", "later")
    assert said.startswith("spmdkit launch: 2 lines are left out here")


def test_closing_gives_up_where_nothing_moves():
    out = Stuck()
    terminal = Terminal(out)
    terminal.write("first\n")
    terminal.write("never\n")
    begin = time.monotonic()
    terminal.close(0.3)
    assert 0.2 < time.monotonic() - begin < 5
    out.go.set()
    terminal._thread.join(5)
    assert not terminal._thread.is_alive()
    assert out.getvalue() == "first\n"


@pytest.mark.parametrize("out", [Full(), io.StringIO()])
def test_a_stream_that_is_full_or_closed(out):
    if not isinstance(out, Full):
        out.close()
    terminal = Terminal(out)
    terminal.write("a\n")
    terminal.write("b\n")
    terminal.close(5)


def test_a_stream_that_stands_still_does_not_hold_up_the_other():
    out, err = Stuck(), io.StringIO()
    screen = Screen.of(out, err)
    screen.out.write("a\n")
    assert out.reached.wait(5)
    screen.say("to \x1b[2Jpeople")
    screen.err.close(5)
    assert err.getvalue() == "spmdkit launch: to \\x1b[2Jpeople\n"
    out.go.set()
    screen.close(5)
    assert out.getvalue() == "a\n"
