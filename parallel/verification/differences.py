"""Measuring how far arrays on a mesh are from those of one device, every copy on every device included."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...layouts.paths import leaves_with_paths

SMALL = 1e-6
"""Part of the largest element of all leaves below which a leaf is noise: its error is measured against that part."""
SMALL_IN_FLOAT32 = 1e-2
"""The same in float32 and narrower."""


class LeafError(NamedTuple):
    """How far one array is from its reference.

    Attributes:
        relative: the largest difference on any device, as a part of the largest element of the reference.
        path: of the leaf.
    """

    relative: float
    path: str


def relative(found: float, reference: float) -> float:
    """The difference of two numbers as a part of the reference; infinite where one is not finite."""
    return float(_error(np.asarray(found), np.asarray(reference), abs(reference)))


def leaf_errors(found: Any, reference: Any, *, scale: float = 1.0, tolerance: float = 0.0) -> list[LeafError]:
    """Compares two pytrees leaf by leaf, the worst first.

    Args:
        found: Arrays on the mesh; every shard on every device is compared, so copies that differ are seen.
        reference: Host arrays, whole.
        scale: A factor on the reference.
        tolerance: That of the comparison: the wider it is, the larger is the noise of small leaves.
    """
    references = [np.asarray(leaf, np.float64) * scale for leaf in jax.tree.leaves(reference)]
    largest = max((_largest(leaf) for leaf in references), default=0.0)
    noise = largest * (SMALL if tolerance < 1e-8 else SMALL_IN_FLOAT32)
    errors = []
    for (path, leaf), expected in zip(leaves_with_paths(found), references, strict=True):
        size = max(_largest(expected), noise)
        parts = [(np.asarray(shard.data), expected[shard.index]) for shard in leaf.addressable_shards]
        errors.append(LeafError(max(_error(part, wanted, size) for part, wanted in parts), path))
    return sorted(errors, reverse=True)


def state_errors(found: Any, reference: Any, params: Any, *, tolerance: float = 0.0) -> list[LeafError]:
    """Compares an optimizer's state leaf by leaf, the worst first.

    What small leaves are measured by is the largest of their own kind: all first moments, all second moments.

    Args:
        found: Arrays on the mesh.
        reference: The same on one device, whole.
        params: The parameters, whose paths tell the kinds.
        tolerance: As in `leaf_errors`.
    """
    ends = sorted((path for path, _ in leaves_with_paths(params)), key=len, reverse=True)
    kinds: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    errors = []
    for (path, leaf), expected in zip(leaves_with_paths(found), jax.tree.leaves(reference), strict=True):
        leaf, expected = numbers(leaf), np.asarray(numbers(expected))
        if not np.isfinite(expected).all() and np.array_equal(leaf, expected, equal_nan=True):
            errors.append(LeafError(0.0, path))  # such as the best loss so far, which begins as infinite
            continue
        end = next((each for each in ends if path == each or path.endswith(f"/{each}")), None)
        members = kinds.setdefault(path if end is None else path[: -len(end)], ({}, {}))
        members[0][path], members[1][path] = leaf, expected
    for arrays, expected in kinds.values():
        errors += leaf_errors(arrays, expected, tolerance=tolerance)
    return sorted(errors, reverse=True)


def numbers(leaf: Any) -> Any:
    """An array of numbers; of random keys, their raw data."""
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def _largest(array: np.ndarray) -> float:
    finite = np.abs(array[np.isfinite(array)])
    return float(finite.max()) if finite.size else 0.0


def _error(found: np.ndarray, reference: np.ndarray, size: float) -> float:
    if not found.size:
        return 0.0
    if not (np.isfinite(found).all() and np.isfinite(reference).all()):
        return float("inf")
    difference = float(np.abs(np.asarray(found, np.float64) - reference).max())
    return difference / max(size, 1e-300) if difference else 0.0


def copies(leaf: jax.Array, axis_names: tuple[str, ...], shape: tuple[int, ...], devices: Any) -> np.ndarray:
    """What each device of a mesh holds of an array.

    Args:
        leaf: An array on the mesh.
        axis_names: Axes of the mesh.
        shape: Their sizes.
        devices: JAX devices of the mesh, in its order.

    Returns:
        The parts, stacked: (*shape, *shape of a part).
    """
    part_of = {shard.device: np.asarray(shard.data, np.float64) for shard in leaf.addressable_shards}
    parts = np.stack([part_of[device] for device in devices])
    assert len(axis_names) == len(shape)
    return parts.reshape(*shape, *parts.shape[1:])
