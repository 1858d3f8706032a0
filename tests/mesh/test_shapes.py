import time

import pytest
from spmdkit.mesh import DeviceMesh
from spmdkit.mesh.shapes import divisors


@pytest.mark.parametrize("number", [1, 2, 3, 12, 36, 97, 5040])
def test_divisors(number):
    assert divisors(number) == [each for each in range(1, number + 1) if number % each == 0]


def test_remedies_of_huge_sizes_take_no_time():
    start = time.perf_counter()
    assert len(divisors(2**31 - 1)) == 2
    with pytest.raises(ValueError, match=r"Sizes that fit 8 devices: fsdp=8"):
        DeviceMesh((10**9, 10**9), ("data", "fsdp"), [f"cuda:{number}" for number in range(8)])
    assert time.perf_counter() - start < 2
