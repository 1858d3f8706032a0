"""The reference shares nothing with what it is there to judge; each piece that has its own gradient, against it."""

import ast
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from reference.transformer import attention, kept_values
from spmdkit.models.attention import causal_attention
from spmdkit.models.layers import dropout

RANDOM = np.random.default_rng(0)
START = RANDOM.bit_generator.state


@pytest.fixture(autouse=True)
def own_numbers():
    """Each test draws the same numbers, whichever tests ran before it."""
    RANDOM.bit_generator.state = START


def normal(*shape):
    return jnp.asarray(RANDOM.normal(size=shape), jnp.float64 if jax.config.jax_enable_x64 else jnp.float32)


def test_the_reference_imports_nothing_of_the_runtime():
    imported = set()
    for path in Path(reference.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add((node.module or "").split(".")[0])
    assert imported <= {"jax", "numpy", "math", "zlib", "functools", "itertools", "dataclasses"}


def assert_same(ours, plain, *arguments, rtol=1e-10):
    """Values and the gradients of every argument, in a random direction."""
    shapes = jax.eval_shape(plain, *arguments)
    direction = jax.tree.map(lambda leaf: normal(*leaf.shape), shapes)

    @partial(jax.jit, static_argnums=0)
    def run(function):
        value, backward = jax.vjp(function, *arguments)
        return value, backward(direction)

    compare = partial(np.testing.assert_allclose, rtol=rtol, atol=rtol)
    jax.tree.map(compare, run(ours), run(plain))


@pytest.mark.parametrize(
    ("length", "heads", "kv_heads"), [(1, 4, 4), (63, 4, 2), (66, 4, 2), (128, 3, 1), (130, 2, 2), (300, 2, 1)]
)
def test_causal_attention(length, heads, kv_heads, float64):
    """In one slice, two, a ragged last one, and four; at 66, with two documents in the second row."""
    query, key, value = normal(2, length, heads, 6), normal(2, length, kv_heads, 6), normal(2, length, kv_heads, 6)
    segments = np.stack([np.zeros(length, int), np.arange(length) >= 33]).astype(np.int32)
    packed = (jnp.asarray(segments),) if length == 66 else ()

    def plain(query, key, value):
        read = [h * kv_heads // heads for h in range(heads)]
        mixed = [attention(query[:, :, h], key[:, :, g], value[:, :, g], *packed) for h, g in enumerate(read)]
        return jnp.stack(mixed, axis=2)

    assert_same(lambda *x: causal_attention(*x, *packed), plain, query, key, value)


def test_dropout(float64):
    """The mask of the documented words, and its gradient."""
    x, example, key = normal(2, 5, 6), jnp.asarray([7, 1 << 20], jnp.int32), jax.random.key(3)
    kept = kept_values(key, "mlp", example, x.shape, 0.3)
    assert 0 < kept.sum() < kept.size
    assert_same(
        lambda x: dropout(x, example, jnp.arange(5), key, name="mlp", rate=0.3),
        lambda x: jnp.where(kept, x / 0.7, 0.0),
        x,
    )


# The optimizer
