"""Checksums of arrays: the same on every mesh, other for every other array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from spmdkit.training.checkpointing.checksums import checksums, part_checksum

DTYPES = ["float32", "bfloat16", "float16", "int32", "uint8", "int8", "bool", "float8_e4m3fn"]


def one(array) -> int:
    return int(checksums({"a": jnp.asarray(array)})[0])


def numbers(dtype, shape=(16, 6)):
    return np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 100, shape).astype(jnp.dtype(dtype))


def plain(array) -> int:
    """The same sum, word by word, in Python."""
    width = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint32}[array.dtype.itemsize]
    total = 0
    for index, word in enumerate(np.ascontiguousarray(array).reshape(-1).view(width).tolist()):
        total += mix((word + mix(index)) % 2**32)
    return total % 2**32


def mix(word: int) -> int:
    word = (word ^ word >> 16) * 0x7FEB352D % 2**32
    word = (word ^ word >> 15) * 0x846CA68B % 2**32
    return word ^ word >> 16


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_summed(dtype):
    assert one(numbers(dtype)) == plain(numbers(dtype))


def test_64_bits_count_as_two_words(float64):
    values = np.random.default_rng(0).normal(size=(4, 3))
    assert one(values) == plain(values)


@pytest.mark.parametrize("dtype", [*DTYPES, "float64", "int64"])
def test_parts_on_the_host_add_up_to_it(dtype):
    values = numbers(dtype, (16, 6))
    origins = [(row, column) for row in (0, 5, 10) for column in (0, 4)]
    parts = [
        (values[row : row + (5 if row < 10 else 6), column : column + 4], (row, column)) for row, column in origins
    ]
    assert sum(part.size for part, _ in parts) == values.size
    assert sum(part_checksum(part, origin, values.shape) for part, origin in parts) % 2**32 == plain(values)
    scalar = values[3, 3]
    assert part_checksum(np.asarray(scalar), (), ()) == plain(np.asarray(scalar)[None])


def test_a_part_beyond_32_bits_counts_as_on_devices():
    """Indices are taken modulo 2**32, and so are strides."""
    shape, values = (2**20, 2**13), np.arange(4, dtype=np.uint32).reshape(1, 4)
    expected = sum(mix((word + mix(index)) % 2**32) for index, word in enumerate(range(4), (2**19 + 3) * 2**13 % 2**32))
    assert part_checksum(values, (2**19 + 3, 0), shape) == expected % 2**32


@pytest.mark.parametrize("spec", [("x", None), (None, "y"), ("x", "y"), (("x", "y"), None)])
def test_it_is_the_same_on_every_mesh(spec):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    values = numbers("float32")
    split = jax.device_put(values, NamedSharding(mesh, PartitionSpec(*spec)))
    assert int(checksums({"a": split})[0].addressable_data(0)) == plain(values)


def test_every_flipped_bit_changes_it():
    values = np.arange(8, dtype=np.float32)
    seen = {one(values)}
    for element in range(8):
        for bit in range(32):
            flipped = values.view(np.uint32).copy()
            flipped[element] ^= np.uint32(1 << bit)
            seen.add(plain(flipped))
    assert len(seen) == 1 + 8 * 32


def test_places_and_lengths_count():
    values = numbers("float32")
    others = [
        values.T.copy(),
        values[::-1].copy(),
        np.roll(values, 1, axis=1),
        values[:-1],
        np.pad(values, ((0, 1), (0, 0))),
    ]
    assert len({one(each) for each in [values, *others]}) == 6
    assert one(np.zeros(3, np.float32)) != one(np.zeros(4, np.float32))


def test_arrays_are_in_the_order_of_their_paths():
    arrays = {"b": jnp.ones(3), "a": jnp.zeros(2), "c": jnp.float32(5)}
    assert checksums(arrays).tolist() == [one(arrays[path]) for path in "abc"]
    assert checksums({}).tolist() == [0]
