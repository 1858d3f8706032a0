"""The background thread: same items, bounded, errors where they belong, and gone when closed."""

import subprocess
import sys
import threading
import time

import pytest
from spmdkit.data.prefetch import run_ahead


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "spmdkit-prefetch"]


def numbers(count, made, closed):
    try:
        for number in range(count):
            made.append(number)
            yield number
    finally:
        closed.append(threading.current_thread().name)


def eventually(condition):
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return condition()


@pytest.mark.parametrize("depth", [0, 1, 2, 7])
def test_same_items_in_order(depth):
    closed = []
    assert list(run_ahead(numbers(5, [], closed), depth)) == [0, 1, 2, 3, 4]
    assert len(closed) == 1
    assert threads() == []


@pytest.mark.parametrize("depth", [1, 3])
def test_so_many_ahead_and_no_more(depth):
    made = []
    items = run_ahead(numbers(100, made, []), depth)
    assert next(items) == 0
    assert eventually(lambda: len(made) == 1 + depth)
    time.sleep(0.05)
    assert len(made) == 1 + depth
    items.close()


def test_what_each_item_takes_is_told_without_the_time_in_which_nobody_asked():
    def slow():
        for number in range(3):
            time.sleep(0.05)
            yield number

    took = []
    for _ in run_ahead(slow(), 1, took.append):
        time.sleep(0.15)
    assert len(took) == 3
    assert all(0.05 <= seconds < 0.14 for seconds in took), took


def test_nothing_starts_before_the_first_item_is_wanted():
    made = []
    items = run_ahead(numbers(100, made, []), 2)
    assert (made, threads()) == ([], [])
    items.close()


@pytest.mark.parametrize("depth", [0, 2])
def test_closing_stops_the_thread_and_closes_the_items(depth):
    closed = []
    items = run_ahead(numbers(100, [], closed), depth)
    next(items)
    items.close()
    assert closed == ["MainThread" if depth == 0 else "spmdkit-prefetch"]
    assert threads() == []


def test_leaving_it_alone_stops_the_thread_too():
    items = run_ahead(numbers(100, [], []), 2)
    next(items)
    del items
    assert eventually(lambda: threads() == [])


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_an_error_is_raised_where_its_item_would_have_come(depth):
    def failing():
        yield from range(3)
        raise RuntimeError("disk on fire")

    items = run_ahead(failing(), depth)
    assert [next(items) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(RuntimeError, match="disk on fire"):
        next(items)
    assert threads() == []


def test_a_program_may_end_without_closing():
    code = (
        "from spmdkit.data.prefetch import run_ahead\nitems = run_ahead((i for i in range(9)), 2)\nprint(next(items))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")
