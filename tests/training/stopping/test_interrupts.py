"""Signals before and after a run listens, in processes of their own."""

import signal
import subprocess
import sys
import time

import pytest

HEAD = """
import hashlib, os, signal, sys, time
from spmdkit.training.stopping.interrupts import SIGNALS, answered, asks_once, ends_on_signals
def say(text):
    os.write(1, f"{text}\\n".encode())
def deaf(seconds):  # in native code, where no handler of Python's runs
    end = time.monotonic() + seconds
    say("ready")
    while time.monotonic() < end:
        hashlib.pbkdf2_hmac("sha256", b"x", b"y", 20_000_000)
"""
ASKS = """
before = {}
@asks_once
def handle(number, frame):
    answered(number)
    signal.signal(number, before[number])
    say("asked")
with ends_on_signals():
    before = {number: signal.signal(number, handle) for number in SIGNALS}
"""


@pytest.fixture
def started():
    """Starts programs that say when they are ready; none outlives the test."""
    processes = []

    def started(code: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-c", HEAD + code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield started
    for process in processes:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"])
def test_ends_at_once_even_in_native_code(name, started):
    process = started("signal.signal(signal.SIGHUP, signal.SIG_DFL)\nwith ends_on_signals(): deaf(30)")
    begin = time.monotonic()
    process.send_signal(getattr(signal, name))
    code, _, err = ended(process)
    assert code == 75
    assert err == f"ended by {name}; the same command resumes from the latest checkpoint, if there is one\n"
    assert time.monotonic() - begin < 8


def test_marked_handler_gets_only_the_first_signal(started):
    for _ in range(4):  # the thread or the handler may be first
        process = started(ASKS + "    say('ready')\n    time.sleep(30)")
        process.terminate()
        assert process.stdout.readline() == "asked\n"
        time.sleep(0.05)
        assert process.poll() is None
        process.terminate()
        assert ended(process)[0] == 75


def test_two_signals_end_a_blocked_process(started):
    process = started(ASKS + "    deaf(30)")
    time.sleep(0.5)
    process.terminate()
    time.sleep(0.3)
    assert process.poll() is None
    process.terminate()
    code, out, err = ended(process)
    assert (code, out) == (75, "")
    assert err.startswith("ended by SIGTERM")


def test_other_handlers_are_kept(started):
    process = started(
        "heard = []\n"
        "with ends_on_signals():\n"
        "    signal.signal(signal.SIGTERM, lambda *_: (heard.append(1), say('mine')))\n"
        "    say('ready')\n"
        "    while len(heard) < 2: time.sleep(0.01)\n"
    )
    for _ in range(2):
        process.terminate()
        assert process.stdout.readline() == "mine\n"
    assert ended(process)[0] == 0


def test_ignored_signals_stay_ignored(started):
    process = started(
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "with ends_on_signals():\n    say('ready')\n    time.sleep(0.5)\nsay('done')"
    )
    process.send_signal(signal.SIGHUP)
    assert ended(process)[:2] == (0, "done\n")


def test_ignores_an_interrupt_while_python_shuts_down(started):
    process = started("with ends_on_signals(until_the_end=True): pass\nsay('ready')\ntime.sleep(0.5)\nsay('done')")
    process.send_signal(signal.SIGINT)
    assert ended(process)[:2] == (0, "done\n")


def test_restores_handlers(started):
    process = started(
        "before = [signal.getsignal(number) for number in SIGNALS]\n"
        "with ends_on_signals(): pass\n"
        "assert before == [signal.getsignal(number) for number in SIGNALS]\n"
        "assert signal.set_wakeup_fd(-1) == -1\n"
        "say('ready')\nsignal.pause()"
    )
    process.terminate()
    assert ended(process)[0] == -signal.SIGTERM


def test_forked_child_ends_alone(started):
    process = started(
        "with ends_on_signals():\n"
        "    child = os.fork()\n"
        "    if not child:\n        time.sleep(30)\n"
        "    time.sleep(0.3)\n"
        "    os.kill(child, signal.SIGTERM)\n"
        "    code = os.waitpid(child, 0)[1]\n"
        "    time.sleep(0.3)\n"
        "    say('ready')\n"
        "sys.exit(os.waitstatus_to_exitcode(code) != -signal.SIGTERM)"
    )
    assert ended(process)[0] == 0


@pytest.mark.slow
def test_message_does_not_wait_for_a_blocked_terminal(started):
    process = started(
        "import fcntl\n"
        "signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
        "with ends_on_signals():\n"
        "    say('ready')\n"
        "    while True: os.write(2, b'x' * 65536)\n"
    )
    time.sleep(0.3)  # nobody reads its stderr: it is stuck in a write
    process.terminate()
    assert process.wait(timeout=10) == 75
    process.communicate()
