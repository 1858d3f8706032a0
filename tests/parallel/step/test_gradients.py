"""Measures of gradients on one device: the norm in float32 whatever their dtype, and what clipping makes of it."""

import jax
import jax.numpy as jnp
import pytest
from spmdkit.parallel.step.gradients import clip_factor, global_norm
from support import toy

from spmdkit import TensorLayout


def test_squares_of_narrow_gradients_are_summed_wide():
    """10,000 squares of 0.01: in bfloat16 a sum would stop early, and in float16 a square of 1e-4 is nearly nothing."""
    mesh = toy.mesh(data=1)
    for dtype, value in (("bfloat16", 2.0**-7), ("float16", 2.0**-14)):
        gradients = {"a": jnp.full((100, 100), value, dtype), "b": jnp.zeros((3,), dtype)}
        layouts = {"a": TensorLayout((None, None), mesh), "b": TensorLayout((None,), mesh)}
        norm = jax.jit(lambda gradients, layouts=layouts: global_norm(gradients, layouts, (), [], jnp.float32(4.0)))
        found = norm(gradients)
        assert found.dtype == jnp.float32
        assert float(found) == pytest.approx(100 * value / 4, rel=1e-5)


@pytest.mark.parametrize(
    ("norm", "largest", "factor"), [(2.0, 1.0, 0.5), (0.5, 1.0, 1.0), (1.0, 1.0, 1.0), (7.0, 0.0, 1.0), (0.0, 1.0, 1.0)]
)
def test_clipping(norm, largest, factor):
    assert float(clip_factor(jnp.float32(norm), largest)) == factor
