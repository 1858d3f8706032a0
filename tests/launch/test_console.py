"""Streams that accept any text, warnings of one line, and the check of the address space."""

import errno
import io
import os
import resource
import sys
import warnings
from contextlib import contextmanager, nullcontext

import pytest
from spmdkit.launch import console
from spmdkit.launch.console import check_address_space, ignore_output_errors, open_console
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
        assert (sys.stdout.encoding, hasattr(sys.stdout, "absent")) == ("ascii", False)
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
    """A stream on a full disk, which is an error once: what follows goes to the file that `fileno` leads to."""

    def write(self, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    def fileno(self):
        return os.open(os.devnull, os.O_WRONLY)


def test_ignored_failure_is_a_warning(monkeypatch):
    said = io.StringIO()
    monkeypatch.setattr(sys, "stdout", Full())
    monkeypatch.setattr(sys, "stderr", said)
    with open_console():
        ignore_output_errors()
        sys.stdout.write("losses")
    assert said.getvalue() == ("warning: the standard output: No space left on device; nothing more is printed there\n")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_only_a_terminal_may_be_gone(is_terminal, monkeypatch):
    class Gone(Full):
        def write(self, text):
            raise OSError(errno.EIO, "Input/output error")

        def isatty(self):
            return is_terminal

    monkeypatch.setattr(sys, "stdout", Gone())
    with nullcontext() if is_terminal else pytest.raises(OSError, match="Input/output error"), open_console():
        sys.stdout.write("losses")


def test_rejects_too_few_addresses(monkeypatch):
    for enough in (resource.RLIM_INFINITY, console.MIN_ADDRESS_SPACE):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=enough: (limit, limit))
        check_address_space()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2**29, resource.RLIM_INFINITY))
    with pytest.raises(RuntimeError, match=r"may use 0\.50 GiB of addresses here \(ulimit -v\), and JAX needs") as info:
        check_address_space()
    assert info.value.exit_code == 75


def test_warnings_are_one_line_inside_the_block():
    shown = "two\n  \x1b[2J", UncheckedStep, "/mine/net.py", 3
    with open_console():
        assert warnings.formatwarning(*shown) == "warning: two \\x1b[2J\n"
        plain = warnings.formatwarning("x", RuntimeWarning, *shown[2:])
        assert plain == "warning: x (RuntimeWarning, /mine/net.py:3)\n"
    assert warnings.formatwarning(*shown).startswith("/mine/net.py:3: UncheckedStep: two\n")
