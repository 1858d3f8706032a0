"""Streams that accept any text, warnings of one line, and the check of the address space."""

import errno
import io
import os
import resource
import sys
import warnings
from contextlib import contextmanager

import flax
import numpy
import pytest
from spmdkit.launch import console
from spmdkit.launch.console import check_address_space, format_warning, ignore_output_errors, open_console
from spmdkit.layouts import table
from spmdkit.parallel.step.manual_axes import UncheckedStep


@contextmanager
def piped(monkeypatch):
    """The standard output as a pipe in ASCII; gives the end that reads it. Not a fixture: pytest sets its own later."""
    reading, writing = os.pipe()
    with io.TextIOWrapper(os.fdopen(writing, "wb", 0), encoding="ascii", write_through=True) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        yield reading


def test_escapes_characters_that_the_encoding_lacks(monkeypatch):
    with piped(monkeypatch) as reading, open_console():
        sys.stdout.write("für 3 ×")
        assert os.read(reading, 100) == b"f\\xfcr 3 \\xd7"
    os.close(reading)


def test_drops_output_without_a_reader(monkeypatch):
    with piped(monkeypatch) as reading:
        before = sys.stdout
        os.close(reading)
        with open_console():
            assert sys.stdout.write("much") == 4
            sys.stdout.write("and more")
        assert sys.stdout is before


class Full(io.StringIO):
    """A stream on a full disk, told so once: what follows goes to the file that `fileno` leads to."""

    def __init__(self, number):
        super().__init__()
        self.number, self.tried = number, 0

    def write(self, text):
        self.tried += 1
        raise OSError(errno.ENOSPC, "No space left on device")

    def fileno(self):
        return self.number


def fill(monkeypatch, folder):
    """Makes the standard output one that takes nothing."""
    monkeypatch.setattr(sys, "stdout", Full(os.open(folder / "out", os.O_WRONLY | os.O_CREAT)))


def test_other_failures_name_the_stream(monkeypatch, tmp_path):
    fill(monkeypatch, tmp_path)
    with open_console(), pytest.raises(OSError, match="No space left") as caught:
        print("losses")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, "the standard output")


def test_ignored_failure_is_a_warning(monkeypatch, tmp_path):
    fill(monkeypatch, tmp_path)
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    with open_console():
        ignore_output_errors()
        sys.stdout.write("losses")
    assert said.getvalue() == ("warning: the standard output: No space left on device; nothing more is printed there\n")


@pytest.mark.parametrize("limit", [resource.RLIM_INFINITY, console.MIN_ADDRESS_SPACE])
def test_accepts_enough_addresses(limit, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert check_address_space() == ""


def test_rejects_too_few_addresses(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2**29, resource.RLIM_INFINITY))
    text = check_address_space()
    assert "may use 0.50 GiB of addresses here (ulimit -v), and JAX needs 2 GiB to start" in text
    assert "ulimit -v unlimited" in text


class OwnKind(UserWarning):
    """A class of the user's."""


@pytest.mark.parametrize(
    ("category", "file", "whose"),
    [
        (UncheckedStep, flax.__file__, ""),  # whoever called what warned
        (UserWarning, table.__file__, ""),
        (RuntimeWarning, table.__file__, ""),
        (UserWarning, flax.__file__, " (of flax)"),
        (RuntimeWarning, numpy.__file__, " (RuntimeWarning of numpy)"),
        (UserWarning, "/mine/net.py", " (of /mine/net.py, line 3)"),
        (OwnKind, "/mine/net.py", " (OwnKind of /mine/net.py, line 3)"),
    ],
)
def test_warning_names_its_owner(category, file, whose):
    assert format_warning("two\n  lines", category, file, 3, "x = 1") == f"warning: two lines{whose}\n"


def test_warning_escapes_control_characters():
    assert format_warning("\x1b[2J", UserWarning, table.__file__, 3) == "warning: \\x1b[2J\n"


def test_warnings_change_only_inside_the_block():
    told = "mind", UncheckedStep, table.__file__, 3
    with open_console():
        assert warnings.formatwarning(*told) == "warning: mind\n"
    assert warnings.formatwarning(*told).startswith(f"{table.__file__}:3: UncheckedStep: mind")
