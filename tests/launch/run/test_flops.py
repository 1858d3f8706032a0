"""FLOP/s are those of the batches that were trained on."""

import numpy as np
import pytest
from spmdkit.data import bucket_by_length, from_dataset
from spmdkit.launch.run.flops import FlopsOfSteps
from spmdkit.models.transformer import transformer
from spmdkit.models.transformer_config import TransformerConfig

CONFIG = TransformerConfig(layers=2, width=16, heads=2, vocabulary=50, length=32)


@pytest.fixture
def buckets():
    sizes = [8] * 30 + [32] * 10
    return bucket_by_length(from_dataset([(np.arange(size),) * 2 for size in sizes]), lengths=[8, 32]).train


def test_buckets_count_as_long_as_they_were(buckets):
    """Three of four batches are of length 8, to within one at every moment."""
    flops = FlopsOfSteps(transformer(CONFIG), buckets, 4)
    short, long = (CONFIG.flops_of_length(length) * 4 for length in (8, 32))
    assert long > 4 * short
    assert flops(0, 4) == pytest.approx((3 * short + long) / 4)
    assert flops(8, 12) == flops(0, 4)
    each = {flops(number, number + 1) for number in range(4)}
    assert each == {short, long}


def test_batches_that_are_left_out_do_not_count(buckets):
    """The third step gets the batch of the fourth, and so on."""
    everything = FlopsOfSteps(transformer(CONFIG), buckets, 4)
    flops = FlopsOfSteps(transformer(CONFIG), buckets, 4, left_out=(2,))
    found = [flops(number, number + 1) for number in range(6)]
    assert found == [everything(number, number + 1) for number in (0, 1, 3, 4, 5, 6)]
    assert found != [everything(number, number + 1) for number in range(6)]
    assert flops(0, 6) == pytest.approx(sum(found) / 6)


def test_other_sources_count_as_the_longest():
    flops = FlopsOfSteps(transformer(CONFIG), from_dataset([(np.arange(32),) * 2] * 8).train, 4)
    assert flops(3, 5) == CONFIG.flops_per_row * 4
