"""Checksums of arrays that do not depend on the mesh: what is restored is bit for bit what was saved, or it is told.

For an array of words x[i], global index i in row-major order, all arithmetic modulo 2**32:

    checksum = sum over i of mix(x[i] + mix(i))

A sum of whole numbers is the same however an array is split, so every mesh gives one checksum, and no array is ever
gathered. An array of 16 or 8 bits counts each element as one word, one of 64 bits as two. A word that changes changes
its own term; words that change places change two. The checksum is made where the array lies, from memory to memory: it
covers writing, the disk, reading and resharding. What reads a checkpoint without devices adds up the same terms with
NumPy, part by part.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
_HOST_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


@jax.jit
def checksums(arrays: Mapping[str, Array]) -> Array:
    """The checksum of each array, in the order of the sorted paths.

    Args:
        arrays: Global arrays by path, on any mesh.

    Returns:
        (number of arrays,) uint32.
    """
    return jnp.stack([_checksum(arrays[path]) for path in sorted(arrays)] or [jnp.uint32(0)])


def part_checksum(part: np.ndarray, origin: Sequence[int], shape: Sequence[int]) -> int:
    """What a part of an array adds to its checksum, computed on the host.

    Args:
        part: A box of the array, of any dtype that `checksums` takes.
        origin: Global indices of its first element.
        shape: Of the whole array.

    Returns:
        A number below 2**32; the sum over parts that make up the array, modulo 2**32, is its checksum.
    """
    if not part.ndim:
        part, origin, shape = part.reshape(1), (0,), (1,)
    words = _host_words(part)
    shape, origin = (tuple(shape), tuple(origin)) if words.ndim == part.ndim else ((*shape, 2), (*origin, 0))
    index = np.zeros((1,) * words.ndim, np.uint32)
    for dim in range(words.ndim):
        stride = np.array(prod(shape[dim + 1 :]) % 2**32, np.uint32)
        along = np.arange(words.shape[dim], dtype=np.uint64) + np.uint64(origin[dim])
        lines = (along % 2**32).astype(np.uint32) * stride
        index = index + lines.reshape(-1, *[1] * (words.ndim - dim - 1))
    return int(np.sum(_mix(words + _mix(index)), dtype=np.uint32))


def _host_words(part: np.ndarray) -> np.ndarray:
    """As `_as_words`."""
    part = np.ascontiguousarray(part)
    if part.dtype == np.bool_:
        return part.astype(np.uint32)
    size = part.dtype.itemsize
    if size == 8:
        return part.view(np.uint32).reshape(*part.shape, 2)
    return part.view(_HOST_WORDS[size]).astype(np.uint32)


def _checksum(array: Array) -> Array:
    words = _as_words(array)
    index = jnp.zeros(words.shape, jnp.uint32)
    for dim in range(words.ndim):
        stride = prod(words.shape[dim + 1 :]) % 2**32
        index = index + lax.broadcasted_iota(jnp.uint32, words.shape, dim) * jnp.uint32(stride)
    return jnp.sum(_mix(words + _mix(index)), dtype=jnp.uint32)


def _as_words(array: Array) -> Array:
    """The bits of an array as words of 32 bits, a dim of two at the end for elements of 64."""
    if array.dtype == jnp.bool_:
        return array.astype(jnp.uint32)
    size = array.dtype.itemsize
    return lax.bitcast_convert_type(array, _WORDS.get(size, jnp.uint32)).astype(jnp.uint32)


def _mix(words: Any) -> Any:
    """Spreads each bit of a word over all of them (C. Wellons 2018, "Prospecting for Hash Functions", lowbias32)."""
    words = (words ^ (words >> 16)) * np.uint32(0x7FEB352D)
    words = (words ^ (words >> 15)) * np.uint32(0x846CA68B)
    return words ^ (words >> 16)
