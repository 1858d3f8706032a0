"""Norms against their formulas in NumPy: over the last dim, in float32 at least, back in the dtype that came in."""

import jax.numpy as jnp
import numpy as np
import pytest
from spmdkit.models.layers.norms import head_norm, layer_norm, norm, rms_norm
from spmdkit.models.transformer_config import TransformerConfig

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(2.0, 3.0, (2, 3, 8)).astype(np.float32)
SCALE, BIAS = RANDOM.normal(size=(2, 8)).astype(np.float32)
EPSILON = 0.5
"""So large that its place in the formula shows."""


def by_hand(x, scale, bias=None):
    wide = x.astype(np.float64)
    centred = wide - wide.mean(-1, keepdims=True) if bias is not None else wide
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + EPSILON) * scale + (0 if bias is None else bias)


def test_formulas():
    np.testing.assert_allclose(rms_norm(X, SCALE, EPSILON), by_hand(X, SCALE), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(layer_norm(X, SCALE, BIAS, EPSILON), by_hand(X, SCALE, BIAS), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "bias"), [("rms", None), ("layer", BIAS)])
def test_the_norm_that_a_config_asks_for(name, bias):
    config = TransformerConfig(vocabulary=8, width=8, heads=2, norm=name, norm_epsilon=EPSILON)
    found = norm(config, X, {"norm": SCALE, "norm_bias": BIAS})
    np.testing.assert_allclose(found, by_hand(X, SCALE, bias), rtol=1e-5, atol=1e-6)


def test_each_head_by_itself():
    heads = X.reshape(2, 3, 2, 4)
    np.testing.assert_allclose(head_norm(heads, SCALE[:4], EPSILON), by_hand(heads, SCALE[:4]), rtol=1e-5, atol=1e-6)


def test_half_precision_is_summed_in_float32():
    """Squares of 300 are too large for float16, and for sums in bfloat16 too coarse."""
    for dtype, tolerance in ((jnp.float16, 1e-3), (jnp.bfloat16, 1e-2)):
        found = rms_norm(jnp.asarray(X * 100, dtype), SCALE, EPSILON)
        assert found.dtype == dtype
        np.testing.assert_allclose(found.astype(np.float32), by_hand(X * 100, SCALE), rtol=tolerance, atol=tolerance)
