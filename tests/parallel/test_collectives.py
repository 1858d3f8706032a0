"""Lines of traffic add up by kind and axes; bfloat16 travels as float32 between simulated devices."""

import pytest
from spmdkit.parallel.collectives import Collective, merge, wire_bytes


def gather(count, size, axes=("fsdp",)):
    return Collective("all-gather", axes, count, size)


def test_lines_of_one_kind_and_axes_add_up():
    scatter = Collective("reduce-scatter", ("fsdp",), 1, 7)
    lines = [scatter, gather(2, 10), gather(1, 4, ("data", "fsdp")), gather(3, 5)]
    assert merge(lines) == (gather(1, 4, ("data", "fsdp")), gather(5, 15), scatter)
    assert merge(reversed(lines)) == merge(lines)


def test_merge_omits_lines_without_calls():
    assert merge([gather(0, 0), gather(2, 8).times(0)]) == merge([]) == ()


@pytest.mark.parametrize(
    ("dtype", "cpu", "gpu"),
    [("bfloat16", 4, 2), ("float16", 2, 2), ("float32", 4, 4), ("float64", 8, 8), ("int16", 2, 2)],
)
def test_bytes_on_the_wire(dtype, cpu, gpu):
    assert (wire_bytes(dtype, "cpu"), wire_bytes(dtype, "gpu")) == (cpu, gpu)
