import jax
import numpy as np
from spmdkit.models.layers.initializers import named_key, truncated_normal

KEY = jax.random.key(0)


def test_standard_deviation_and_bounds():
    drawn = np.asarray(truncated_normal(KEY, "w", (400, 500), 0.3))
    assert drawn.dtype == np.float32
    np.testing.assert_allclose(drawn.std(), 0.3, rtol=0.01)
    np.testing.assert_allclose(drawn.mean(), 0, atol=0.01)
    assert np.abs(drawn).max() <= 2 * 0.3 / 0.879


def test_depends_on_the_name_and_the_key():
    draws = [truncated_normal(KEY, "a", (4,), 1.0), truncated_normal(KEY, "b", (4,), 1.0)]
    draws.append(truncated_normal(jax.random.key(1), "a", (4,), 1.0))
    assert len({np.asarray(drawn).tobytes() for drawn in draws}) == 3
    np.testing.assert_array_equal(draws[0], truncated_normal(KEY, "a", (4,), 1.0))


def test_named_keys_never_change():
    """A change here changes every run's first parameters."""
    assert jax.random.key_data(named_key(KEY, "embed/tokens")).tolist() == [1931779501, 2404035723]


def test_float32_whatever_the_default(float64):
    np.testing.assert_array_equal(truncated_normal(KEY, "a", (4,), 1.0).dtype, np.float32)
