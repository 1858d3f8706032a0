"""Assertions for your own tests.

from spmdkit.testing import CollectiveBudget

CollectiveBudget({"all_gather@fsdp": 2, "all_reduce@data,fsdp": 1}, max_bytes=1_000_000).check(step, batch)
"""

# pyright: reportMissingImports=false

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .mesh import DeviceMesh
    from .parallel import Step

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all", "ragged-all-to-all")
"""The names of HLO; "_" may replace "-"."""


class CollectiveBudget:
    """The collectives that a compiled step must have, and no others.

    Attributes:
        counts: "kind@axis" or "kind@axis,axis" -> the number of such collectives in one step. "kind over axis x axis",
            as `spmdkit explain` prints it, is the same. A collective in a loop counts once per turn.
        max_bytes: The maximum number of bytes of all of them, as `Collective.bytes` counts them; 0 = no limit.
    """

    def __init__(self, counts: Mapping[str, int], max_bytes: int = 0) -> None:
        """Creates a budget; `check` compares a step with it."""
        self.counts = dict(counts)
        self.max_bytes = max_bytes

    def check(self, step: "Step", batch: Mapping[str, Any]) -> None:
        """Asserts the collectives of one step, counted in the program that XLA compiled.

        Args:
            step: A step of `build_step`.
            batch: A global batch, or the shapes and dtypes of one.

        Raises:
            ValueError: The kind or an axis of a key is unknown.
            AssertionError: The counts differ or the bytes exceed the maximum. The message lists both counts of each
                kind that differs, and every collective.
        """
        import jax

        from .parallel import census

        mesh = step.plan.mesh
        expected = {_normal_name(key, mesh): count for key, count in self.counts.items()}
        shapes = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in batch.items()}
        lines = census(step.compile(shapes).as_text() or "", mesh)
        text = "the compiled step has:\n" + ("\n".join(map(str, lines)) or "none")
        found = {f"{each.kind} over {' x '.join(each.axes)}": each.count for each in lines}
        differing = [
            f"{name}: expected {expected.get(name, 0)}, found {found.get(name, 0)}"
            for name in sorted({*expected, *found})
            if expected.get(name, 0) != found.get(name, 0)
        ]
        assert not differing, "\n".join(["the step does not keep to its collective budget:", *differing, text])
        total = sum(each.bytes for each in lines)
        too_many = f"{total:,} bytes exceed max_bytes={self.max_bytes:,}; {text}"
        assert not self.max_bytes or total <= self.max_bytes, too_many


def assert_collectives(step: "Step", batch: Mapping[str, Any], expected: Mapping[str, int], max_bytes: int = 0) -> None:
    """Asserts the collectives of one step: `CollectiveBudget(expected, max_bytes).check(step, batch)`."""
    CollectiveBudget(expected, max_bytes).check(step, batch)


def _normal_name(key: str, mesh: "DeviceMesh") -> str:
    """Returns a key of a budget as "kind over axis x axis", axes in the order of the mesh."""
    kind, *rest = re.split(r"@| over ", key)
    kind = kind.replace("_", "-")
    axes = [axis for part in rest for axis in re.split(r" x |,", part)]
    if kind not in KINDS or len(rest) != 1:
        raise ValueError(f"budget key {key!r}: expected KIND@AXIS, where KIND is one of {', '.join(KINDS)}.")
    unknown = [axis for axis in axes if axis not in mesh.axis_names]
    if unknown:
        raise ValueError(f"budget key {key!r}: the mesh has no axis {unknown[0]!r}, only {', '.join(mesh.axis_names)}.")
    return f"{kind} over {' x '.join(axis for axis in mesh.axis_names if axis in axes)}"
