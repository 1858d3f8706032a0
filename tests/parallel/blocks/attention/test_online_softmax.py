"""Slices of queries; `test_ring.py` compares the numbers with one device, in slices too."""

import pytest
from spmdkit.parallel.blocks.attention import online_softmax


@pytest.mark.parametrize(("length", "slices"), [(1, 1), (1024, 1), (1025, 5), (2048, 2), (3000, 3)])
def test_slices_are_few_and_equal(length, slices):
    assert online_softmax._num_slices(length) == slices
