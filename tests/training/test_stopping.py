"""The gate that every step passes: it closes at one step for all, whoever waits where."""

import os
import signal
import threading
import time

import pytest
from spmdkit.training.stopping import SIGNALS, Gate, stops_on_signals


def until(condition, seconds=5):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_an_open_gate_lets_every_step_pass():
    gate = Gate()
    assert all(gate.passes(number) for number in range(1, 100))
    assert not gate.is_closing


def test_whoever_is_behind_goes_on_to_the_last_step_of_all():
    """Two hosts, one of them two steps ahead: both stop after the same step."""
    ahead, behind, trained = Gate(), Gate(), []
    for number in range(1, 8):
        assert ahead.passes(number)
    for number in range(1, 6):
        assert behind.passes(number)
    last = max(ahead.close(), behind.close())
    thread = threading.Thread(target=lambda: trained.append([n for n in range(6, 20) if behind.passes(n)]))
    thread.start()
    time.sleep(0.05)
    assert thread.is_alive(), "it waits until it is decided"
    for gate in (ahead, behind):
        gate.stop_after(last, "SIGTERM")
    thread.join(5)
    assert trained == [[6, 7]]
    assert not ahead.passes(8)
    assert (behind.reason, behind.is_closing) == ("SIGTERM", True)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_closes_it_and_the_next_is_not_ours(number):
    seen = []
    before = signal.signal(number, lambda *ignored: seen.append("theirs"))
    try:
        with stops_on_signals() as gate:
            assert gate.passes(1)
            os.kill(os.getpid(), number)
            until(lambda: gate.reason)
            assert not gate.passes(2)
            assert (gate.reason, seen) == (number.name, [])
            os.kill(os.getpid(), number)
            until(lambda: seen)
        assert signal.getsignal(number)(0, None) is None
        assert seen == ["theirs", "theirs"], "the handler of before is back"
    finally:
        signal.signal(number, before)


def test_a_signal_that_is_ignored_stays_so():
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stops_on_signals() as gate:
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.05)
            assert gate.passes(1)
            assert not gate.reason
    finally:
        signal.signal(signal.SIGHUP, before)


def test_outside_the_main_thread_nothing_is_listened_to():
    gates = []

    def run():
        with stops_on_signals() as gate:
            gates.append(gate.passes(1))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(5)
    assert gates == [True]
