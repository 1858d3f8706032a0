"""Assertions for your own tests.

from spmdkit.testing import assert_collectives

assert_collectives(step, batch, {"all-reduce over data": 3}, max_bytes=1_000_000)
"""

# pyright: reportMissingImports=false

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .parallel import Step


def assert_collectives(step: "Step", batch: Mapping[str, Any], expected: Mapping[str, int], max_bytes: int = 0) -> None:
    """Asserts the collectives of one step, counted in the program that XLA compiled.

    Args:
        step: A step of `build_step`.
        batch: A global batch, or the shapes and dtypes of one.
        expected: "kind over axis x axis" -> the number of such collectives, such as `{"all-gather over fsdp": 57}`.
        max_bytes: The maximum number of bytes of all of them, as `Collective.bytes` counts them; 0 = no limit.

    Raises:
        AssertionError: The counts differ or the bytes exceed the maximum. The message lists every collective.
    """
    import jax

    from .parallel import census

    shapes = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in batch.items()}
    found = census(step.compile(shapes).as_text() or "", step.plan.mesh)
    lines = "\n".join(map(str, found)) or "none"
    counts = {f"{each.kind} over {' x '.join(each.axes)}": each.count for each in found}
    assert counts == dict(expected), f"expected {dict(expected)}, the compiled step has:\n{lines}"
    total = sum(each.bytes for each in found)
    assert not max_bytes or total <= max_bytes, (
        f"{total:,} bytes exceed max_bytes={max_bytes:,}; the compiled step has:\n{lines}"
    )
