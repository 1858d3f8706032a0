"""Differences between arrays on a mesh and on one device, including every copy on every device."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...layouts.paths import leaves_with_paths
from ...layouts.tensor_layout import TensorLayout
from ..step.state import TrainState
from .reference import Reference, Sums
from .rounding import MAX_WIDER, TOLERANCES, Narrowing, error_scale, undecided, width

SMALL = 1e-6
"""Leaves whose largest element is below this fraction of the largest element of all leaves are noise; the fraction is
then the scale of their errors."""
SMALL_IN_FLOAT32 = 1e-2
"""The same fraction for float32 and narrower dtypes."""
NEAR = 1e-4
"""The tolerance for a measured ratio to count as equal to a number."""
INIT_TOLERANCE = 1e-5
"""The tolerance of initial parameters, which most models draw in float32."""

GRADIENTS, PARAMETERS, OPTIMIZER, MODEL_STATE = "gradients", "parameters", "optimizer's state", "the model's state"
"""The kinds of arrays that are compared: gradients of the first batch, the others after all steps."""


class LeafError(NamedTuple):
    """The distance of one array from its reference.

    Attributes:
        relative: The largest difference on any device, relative to the largest element of the reference.
        path: The path of the leaf.
        wider: The factor by which its tolerance is wider than usual, because rounding alone changes it as much.
        left_out: The number of elements that are not compared, because rounding alone decides their update.
        tolerance: The tolerance of arrays of its kind.
    """

    relative: float
    path: str
    wider: float = 1.0
    left_out: int = 0
    tolerance: float = 0.0


def relative(found: float, reference: float) -> float:
    """Returns the difference of two numbers relative to the reference; infinite if one is not finite."""
    return float(_error(np.asarray(found), np.asarray(reference), abs(reference)))


def array_errors(
    found: Sums, saved: TrainState, reference: Reference, of_loss: float, of_update: float
) -> dict[str, list[LeafError]]:
    """Compares every array of a training with that of one device: kind of array -> errors, the worst first.

    Args:
        found: The sums of the first batch.
        saved: The state after all steps. All blocks are in the model's order.
        reference: The training on one device.
        of_loss: The tolerance of gradients.
        of_update: The tolerance of all arrays after the steps.
    """
    moved = reference.moved or reference
    update: Any = {"tolerance": of_update, "left_out": _undecided_elements(reference, moved, of_update)}
    return {
        GRADIENTS: leaf_errors(
            found.gradients, reference.first.gradients, moved=moved.first.gradients, tolerance=of_loss
        ),
        PARAMETERS: leaf_errors(saved.params, reference.params, moved=moved.params, **update),
        OPTIMIZER: state_errors(saved.opt_state, reference.opt_state, saved.params, moved=moved.opt_state, **update),
        MODEL_STATE: leaf_errors(saved.model_state, reference.state, moved=moved.state, tolerance=of_update),
    }


def _undecided_elements(reference: Reference, moved: Reference, tolerance: float) -> Any:
    """Returns masks of the parameter elements whose updates rounding decides; None if this was not measured."""
    if tolerance not in MAX_WIDER:
        return None
    trees = (reference.first.gradients, moved.first.gradients, reference.params, moved.params)
    leaves = [jax.tree.leaves(tree) for tree in trees]
    limits = [MAX_WIDER[tolerance] * tolerance * size for size in _sizes(leaves[2], tolerance)]
    masks = [undecided(*each) for each in zip(*leaves, limits, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(reference.params), masks)


def leaf_errors(
    found: Any, reference: Any, *, tolerance: float = 0.0, moved: Any = None, left_out: Any = None
) -> list[LeafError]:
    """Compares two pytrees leaf by leaf, the worst first.

    Args:
        found: Arrays on the mesh; every shard on every device is compared, which detects differing copies.
        reference: Whole host arrays.
        tolerance: The tolerance of the comparison; a wider one means more noise in small leaves.
        moved: The reference for perturbed parameters, see `rounding.py`; None if not measured.
        left_out: Masks of the elements that are not compared; None compares all.
    """
    references, others = (
        [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)] for tree in (reference, moved)
    )
    masks = jax.tree.leaves(left_out) or [np.zeros(leaf.shape, bool) for leaf in references]
    sizes = _sizes(references, tolerance)
    errors = []
    for (path, leaf), expected, other, mask, own in zip(
        leaves_with_paths(found), references, others or references, masks, sizes, strict=True
    ):
        size = error_scale(own, expected[~mask], other[~mask], tolerance)
        shards = [(np.asarray(shard.data), shard.index) for shard in leaf.addressable_shards]
        parts = [(part[~mask[index]], expected[index][~mask[index]]) for part, index in shards]
        error = max(_error(part, wanted, size) for part, wanted in parts)
        errors.append(LeafError(error, path, size / own if own else 1.0, int(mask.sum()), tolerance))
    return sorted(errors, reverse=True)


def _sizes(references: list[np.ndarray], tolerance: float) -> list[float]:
    """Returns the scale of each array: its largest element, or a fraction of the largest of all."""
    largest = max(map(_largest, references), default=0.0)
    noise = largest * (SMALL if tolerance < 1e-8 else SMALL_IN_FLOAT32)
    return [max(_largest(leaf), noise) for leaf in references]


def state_errors(
    found: Any, reference: Any, params: Any, *, tolerance: float = 0.0, moved: Any = None, left_out: Any = None
) -> list[LeafError]:
    """Compares an optimizer's state leaf by leaf, the worst first.

    The scale of a small leaf is the largest of its kind: all first moments, or all second moments.

    Args:
        found: Arrays on the mesh.
        reference: The arrays of one device, whole.
        params: The parameters; their paths identify the kinds.
        tolerance: The tolerance; see `leaf_errors`.
        moved: The perturbed reference; see `leaf_errors`.
        left_out: Masks of the parameters, used for optimizer arrays of the same shape.
    """
    masks = dict(leaves_with_paths(left_out))
    ends = sorted((path for path, _ in leaves_with_paths(params)), key=len, reverse=True)
    kinds: dict[str, tuple[dict[str, Any], ...]] = {}
    errors = []
    others = jax.tree.leaves(reference if moved is None else moved)
    for (path, leaf), expected, other in zip(leaves_with_paths(found), jax.tree.leaves(reference), others, strict=True):
        leaf, expected, other = numbers(leaf), np.asarray(numbers(expected)), np.asarray(numbers(other))
        if not np.isfinite(expected).all() and np.array_equal(leaf, expected, equal_nan=True):
            errors.append(LeafError(0.0, path))  # such as the best loss so far, which begins as infinite
            continue
        end = next((each for each in ends if path == each or path.endswith(f"/{each}")), None)
        mask = masks.get(end or "")
        if mask is None or mask.shape != expected.shape:
            mask = np.zeros(expected.shape, bool)
        members = kinds.setdefault(path if end is None else path[: -len(end)], ({}, {}, {}, {}))
        for member, value in zip(members, (leaf, expected, other, mask), strict=True):
            member[path] = value
    for arrays, expected, others, mask in kinds.values():
        errors += leaf_errors(arrays, expected, tolerance=tolerance, moved=others, left_out=mask)
    return sorted(errors, reverse=True)


def numbers(leaf: Any) -> Any:
    """Returns an array of numbers: the raw data of random keys, any other array itself."""
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


def differing_copies(leaf: jax.Array, expected: np.ndarray, layout: TensorLayout) -> tuple[list[str], bool]:
    """Finds replicas that differ.

    Args:
        leaf: An array on the mesh.
        expected: The whole array of one device.
        layout: The layout of the array; devices along the axes that it does not use must hold equal values.

    Returns:
        The axes along which devices hold different values, and whether the sum of these values is the reference.
    """
    names, devices = tuple(layout.mesh.axis_names), layout.mesh.backend_mesh.devices
    part_of = {shard.device: np.asarray(shard.data, np.float64) for shard in leaf.addressable_shards}
    parts = np.stack([part_of[device] for device in devices.flat])
    held = parts.reshape(*devices.shape, *parts.shape[1:])
    bound = NEAR * max(np.abs(held).max(), 1e-300)
    differ = [
        dim for dim, axis in enumerate(names) if axis not in layout.used_axes and np.ptp(held, axis=dim).max() > bound
    ]
    summed = held.sum(axis=tuple(differ), keepdims=True)[(0,) * len(names)]
    own = expected[leaf.sharding.devices_indices_map(leaf.shape)[devices.flat[0]]]
    adds_up = np.abs(summed - own).max(initial=0.0) <= NEAR * np.abs(own).max(initial=0.0)
    return [names[dim] for dim in differ], bool(adds_up)


class Widened(NamedTuple):
    """A tolerance that was widened, or elements that were left out.

    Attributes:
        what: The quantities that are compared with this tolerance.
        array: The array that rounding affects.
        tolerance: The largest relative error that is allowed; None if elements are left out.
        reason: The measurement, or the line, that explains it.
    """

    what: str
    array: str
    tolerance: float | None
    reason: str

    def __str__(self) -> str:
        bound = "" if self.tolerance is None else f" to {self.tolerance:.1e}"
        return f"{self.what}{bound}: {self.array} {self.reason}"


def widened(
    init: LeafError,
    errors: Mapping[str, Sequence[LeafError]],
    narrowings: tuple[Narrowing, Narrowing],
    dtypes: tuple[str, str],
) -> Iterator[Widened]:
    """Lists the tolerances that were widened.

    Args:
        init: The worst initial parameter.
        errors: The comparison of all arrays.
        narrowings: The narrowest numbers of the loss, and of the update.
        dtypes: The dtypes of the parameters and of the computation.
    """
    usual = TOLERANCES[min(dtypes, key=width)]
    if INIT_TOLERANCE >= init.relative > usual:
        yield Widened("initial parameters", init.path, INIT_TOLERANCE, f"differs by {init.relative:.1e}")
    for what, narrowing in zip(("loss and gradients", "parameters and optimizer's state"), narrowings, strict=True):
        if narrowing.tolerance > usual:
            place = f" at {narrowing.place}" if narrowing.place else ""
            yield Widened(what, narrowing.array, narrowing.tolerance, f"is cast to {narrowing.dtype}{place}")
    for kind, arrays in errors.items():
        for array in sorted(arrays, key=lambda each: each.path):
            if array.left_out:
                elements = f"is not compared in {array.left_out} elements"
                reason = f"{elements}: their gradient is rounding noise, which decides the update"
                yield Widened(kind, array.path, None, reason)
            if array.wider > 1:
                reason = "changes as much from one rounding of the parameters on one device"
                yield Widened(kind, array.path, array.wider * array.tolerance, reason)
