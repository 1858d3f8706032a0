"""Streams that take any text, and whose reader may go; what a process is told that has too few addresses."""

import errno
import io
import os
import resource
import sys
from contextlib import contextmanager

import pytest
from spmdkit.launch import streams
from spmdkit.launch.streams import outlive_output, tolerant_streams, too_little_memory


@contextmanager
def piped(monkeypatch):
    """The standard output as a pipe in ASCII; gives the end that reads it. Not a fixture: pytest sets its own later."""
    reading, writing = os.pipe()
    with io.TextIOWrapper(os.fdopen(writing, "wb", 0), encoding="ascii", write_through=True) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        yield reading


def test_what_an_encoding_lacks_is_an_escape(monkeypatch):
    with piped(monkeypatch) as reading, tolerant_streams():
        sys.stdout.write("für 3 ×")
        assert os.read(reading, 100) == b"f\\xfcr 3 \\xd7"
    os.close(reading)


def test_what_nobody_reads_is_dropped(monkeypatch):
    with piped(monkeypatch) as reading:
        before = sys.stdout
        os.close(reading)
        with tolerant_streams():
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


def test_any_other_failure_is_an_error_that_names_the_stream(monkeypatch, tmp_path):
    fill(monkeypatch, tmp_path)
    with tolerant_streams(), pytest.raises(OSError, match="No space left") as caught:
        print("losses")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, "the standard output")


def test_a_failure_that_is_outlived_is_a_warning(monkeypatch, tmp_path):
    fill(monkeypatch, tmp_path)
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    with tolerant_streams():
        outlive_output()
        sys.stdout.write("losses")
    assert said.getvalue() == (
        "warning: the standard output: No space left on device; from here on nothing is printed there\n"
    )


@pytest.mark.parametrize("limit", [resource.RLIM_INFINITY, streams.LEAST_ADDRESSES])
def test_enough_memory(limit, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert too_little_memory() == ""


def test_too_little_memory(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2**29, resource.RLIM_INFINITY))
    text = too_little_memory()
    assert "may use 0.50 GiB of addresses here (ulimit -v), and JAX takes 2 GiB to start" in text
    assert "ulimit -v unlimited" in text
