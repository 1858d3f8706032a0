"""Bytes of arrays, and their format."""

import jax
import numpy as np
import pytest
from spmdkit.layouts.sizes import RowSplit, array_bytes, format_bytes


def test_counts_bytes():
    assert array_bytes((3, 4), np.dtype("float32")) == 48
    assert array_bytes((), jax.numpy.dtype("bfloat16")) == 2
    assert array_bytes((2,), jax.random.key(0).dtype) == 16


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        *[(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), ((1 << 20) - 1, "1 MiB"), (1 << 20, "1 MiB")],
        *[((1 << 30) - (1 << 20), "1023 MiB"), (5 << 30, "5 GiB"), (3 << 50, "3 PiB"), (1 << 70, "1024 EiB")],
    ],
)
def test_formats_bytes(num_bytes, text):
    assert format_bytes(num_bytes) == text


def test_finds_row_counts_that_fit():
    split = RowSplit({"data": 2, "accumulate": 3})
    assert split.total == 6
    assert [rows for rows in range(-6, 20) if split.fits(rows)] == [6, 12, 18]
    assert (split.nearest(16), split.nearest(1)) == (18, 6)
    assert (str(split), str(RowSplit({}))) == ("data 2 x accumulate 3", "1 device")
