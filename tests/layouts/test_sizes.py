"""Bytes of arrays, and how they are written."""

import jax
import numpy as np
import pytest
from spmdkit.layouts.sizes import array_bytes, counted, format_bytes


def test_counts_bytes():
    assert array_bytes((3, 4), np.dtype("float32")) == 48
    assert array_bytes((), jax.numpy.dtype("bfloat16")) == 2
    assert array_bytes((2,), jax.random.key(0).dtype) == 16


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        ((1 << 20) - 1, "1 MiB"),
        (1 << 20, "1 MiB"),
        ((1 << 30) - (1 << 20), "1023 MiB"),
        (5 << 30, "5 GiB"),
        (3 << 50, "3 PiB"),
        (1 << 70, "1024 EiB"),
    ],
)
def test_writes_bytes(num_bytes, text):
    assert format_bytes(num_bytes) == text


def test_writes_counts():
    assert [counted(number, "device") for number in (0, 1, 1024)] == ["0 devices", "1 device", "1,024 devices"]
