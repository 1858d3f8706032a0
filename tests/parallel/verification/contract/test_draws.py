"""Initial parameters drawn by the host: of the same shapes, dtypes and distributions, and nothing else changed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from spmdkit.parallel.verification.contract import draws
from spmdkit.parallel.verification.contract.draws import with_host_draws

KEY = jax.random.key(5)


def init(key):
    keys = jax.random.split(key, 8)
    return {
        "normal": jax.random.normal(keys[0], (200, 50)) * 0.1 + 2,
        "uniform": jax.random.uniform(keys[1], (200, 50), minval=-3, maxval=-1),
        "truncated": jax.random.truncated_normal(keys[2], -1, 2, (200, 50)),
        "glorot": jax.nn.initializers.glorot_normal()(keys[3], (200, 50), jnp.float32),
        "stacked": jax.vmap(lambda key: jax.random.normal(key, (100,)))(jax.random.split(keys[4], 100)),
        "half": jax.random.normal(keys[5], (100, 100), jnp.bfloat16),
        "looped": lax.map(lambda key: jax.random.normal(key, (100,)), jax.random.split(keys[6], 100)),
        "ones": [jnp.ones(3), np.float32(4)],
        "kind": jax.random.randint(keys[7], (4,), 0, 9),
    }


@pytest.fixture(scope="module")
def pair():
    return with_host_draws(init, KEY), jax.jit(init)(KEY)


def test_structure_shapes_and_dtypes_are_the_same(pair):
    found, expected = (jax.tree.map(lambda leaf: (jnp.shape(leaf), jnp.asarray(leaf).dtype), tree) for tree in pair)
    assert found == expected


def test_distributions_are_the_same(pair):
    for name in ("normal", "uniform", "truncated", "glorot", "stacked", "half", "looped"):
        found, expected = (np.asarray(tree[name], np.float64) for tree in pair)
        assert np.mean(found) == pytest.approx(np.mean(expected), abs=0.05 * float(np.std(expected))), name
        assert np.std(found) == pytest.approx(np.std(expected), rel=0.05), name
        assert np.quantile(found, [0.05, 0.95]) == pytest.approx(
            np.quantile(expected, [0.05, 0.95]), abs=0.1 * float(np.std(expected))
        )
    assert np.abs(np.asarray(pair[0]["truncated"]) - 0.5).max() <= 1.5
    assert -3 <= np.min(pair[0]["uniform"]) < np.max(pair[0]["uniform"]) <= -1


def test_what_is_not_drawn_by_the_host_is_as_it_was(pair):
    for name in ("ones", "kind", "looped"):
        assert jax.tree.all(jax.tree.map(np.array_equal, *(tree[name] for tree in pair))), name


def test_a_key_gives_the_same_numbers_and_another_key_others():
    first, again, other = (with_host_draws(init, key)["normal"] for key in (KEY, KEY, jax.random.key(6)))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_the_program_that_is_compiled_draws_nothing(monkeypatch):
    programs = []
    quickly = draws.compile_quickly
    monkeypatch.setattr(
        draws, "compile_quickly", lambda *a: programs.append(str(jax.make_jaxpr(a[0])(*a[1:]))) or quickly(*a)
    )
    with_host_draws(lambda key: jax.nn.initializers.glorot_normal()(key, (4, 4), jnp.float32), KEY)
    assert "random_bits" not in programs[0]
    with_host_draws(lambda key: lax.map(lambda key: jax.random.normal(key, (4,)), jax.random.split(key, 3)), KEY)
    assert "random_bits" in programs[1]
