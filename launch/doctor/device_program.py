"""Computes known numbers on every device of this process, and prints what is wrong: a program of its own for `doctor`.

A child process runs this file, because opening a device can hang. It imports nothing of the package.

The numbers are small integers, whose products and sums are exact in any order and in any precision of a matrix unit
(TF32, three passes of bfloat16): below 2**24 in float32. So every bit of a result is known, and a device whose result
differs is faulty. The sizes occupy all cores of a GPU.
"""

import functools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

SIZES = {"cpu": 256}
"""Platform -> rows and columns of the matrices."""
SIZE = 2048
"""The same for every other platform: 256 tiles of 128 x 128, more than the cores of any GPU."""
TERMS = 2**22
MAX_FACTOR = 7
MAX_TERM = 3


def product(left: Any, right: Any) -> Any:
    """Multiplies two matrices, with sums in float32."""
    return jnp.matmul(left, right, preferred_element_type=jnp.float32)


class Known(NamedTuple):
    """Inputs with known results.

    Attributes:
        left, right: Matrices of integers of at most MAX_FACTOR, float32.
        matrix: Their product, float64.
        terms: Integers of at most MAX_TERM, float32.
        total: Their sum.
    """

    left: np.ndarray
    right: np.ndarray
    matrix: np.ndarray
    terms: np.ndarray
    total: float


@functools.cache
def known_numbers(size: int) -> Known:
    """Returns the inputs and results for matrices of `size` rows and columns; size * 49 must be below 2**24."""
    random = np.random.default_rng(0)
    left, right = random.integers(-MAX_FACTOR, MAX_FACTOR + 1, (2, size, size)).astype(np.float32)
    matrix = left.astype(np.float64) @ right.astype(np.float64)
    terms = random.integers(0, MAX_TERM + 1, TERMS).astype(np.float32)
    return Known(left, right, matrix, terms, float(terms.sum(dtype=np.float64)))


def find_problems(
    device: Any,
    known: Known,
    multiply: Callable[[Any, Any], Any] = product,
    add: Callable[[Any], Any] = jnp.sum,
) -> Iterator[str]:
    """Yields what a device computes wrongly: a known product in float32 and in bfloat16, and a known sum.

    Args:
        device: The device.
        known: The inputs and results.
        multiply: Multiplies two matrices; compiled for the device.
        add: Adds the elements of an array; compiled for the device.
    """
    for dtype in (jnp.float32, jnp.bfloat16):
        factors = jax.device_put((known.left.astype(dtype), known.right.astype(dtype)), device)
        computed = np.asarray(jax.jit(multiply)(*factors), np.float64)
        different = np.argwhere(computed != known.matrix)
        if len(different):
            row, column = different[0]
            rows, columns = known.matrix.shape
            yield (
                f"a product of {rows} x {columns} matrices in {jnp.dtype(dtype).name}: {len(different):,} of "
                f"{known.matrix.size:,} numbers are wrong, the first at [{row}, {column}]: "
                f"{computed[row, column]:g} instead of {known.matrix[row, column]:g}"
            )
    total = float(jax.jit(add)(jax.device_put(known.terms, device)))
    if total != known.total:
        yield f"a sum of {TERMS:,} numbers in float32: {total:.0f} instead of {known.total:.0f}"


def examine(devices: Sequence[Any], **functions: Callable[..., Any]) -> dict[str, list[str]]:
    """Returns the problems of each device, by its name; an error of JAX is one.

    Args:
        devices: The devices.
        functions: See `find_problems`.
    """
    found = {}
    for device in devices:
        try:
            known = known_numbers(SIZES.get(device.platform, SIZE))
            problems = [*find_problems(device, known, **functions)]
        except Exception as error:  # a faulty device raises many types
            problems = [f"{type(error).__name__}: {str(error).strip()[:300] or 'no message'}"]
        found[f"{device.platform}:{device.id}"] = problems
    return found


def main(chosen: Sequence[str]) -> None:
    """Prints the devices and their problems as JSON on the last line.

    Args:
        chosen: The positions of the devices that this process uses; none = all.
    """
    devices = jax.local_devices()
    own = [devices[int(number)] for number in chosen if int(number) < len(devices)] or devices
    first = devices[0]
    result = {"platform": first.platform, "kind": first.device_kind, "count": len(devices), "problems": examine(own)}
    print("\n" + json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
