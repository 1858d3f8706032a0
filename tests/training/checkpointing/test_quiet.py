"""What Orbax and TensorStore print of a failure is left out, and nothing of anybody else."""

import logging
import sys
from types import SimpleNamespace

import pytest
from spmdkit.training.checkpointing.quiet import leave_errors_to_one_message
from spmdkit.training.ending.exits import TRACEBACK_VARIABLE

ORBAX, OURS = "/site-packages/orbax/checkpoint/save.py", "/site-packages/spmdkit/loop.py"
CLOSED, OTHER = RuntimeError("Event loop is closed"), RuntimeError("something else")


@pytest.fixture
def quiet(monkeypatch):
    """As at the first checkpoints of a process; gives what was not left out."""
    passed = []
    for name in ("absl", "asyncio"):
        monkeypatch.setattr(logging.getLogger(name), "filters", [])
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: passed.append(raised.exc_value))
    return leave_errors_to_one_message.__wrapped__, passed


def lets_through(logger: str, path: str, text: str = "") -> bool:
    record = logging.LogRecord(logger, logging.ERROR, path, 1, text, (), None)
    return bool(logging.getLogger(logger).filter(record))


def raise_unraisable(error: Exception) -> None:
    sys.unraisablehook(SimpleNamespace(exc_type=type(error), exc_value=error))


def test_what_orbax_says_is_left_out_and_nothing_else(quiet, monkeypatch):
    leave_out, passed = quiet
    monkeypatch.delenv(TRACEBACK_VARIABLE, raising=False)
    leave_out()
    assert [lets_through("absl", path) for path in (ORBAX, OURS)] == [False, True]
    assert [lets_through("asyncio", OURS, f"Task exception: {path}") for path in (ORBAX, OURS)] == [False, True]
    for error in (CLOSED, OTHER):
        raise_unraisable(error)
    assert passed == [OTHER]


def test_all_is_told_where_tracebacks_are_asked_for(quiet, monkeypatch):
    leave_out, passed = quiet
    monkeypatch.setenv(TRACEBACK_VARIABLE, "1")
    leave_out()
    assert lets_through("absl", ORBAX)
    raise_unraisable(CLOSED)
    assert passed == [CLOSED]
