"""The reference shares nothing with what it is there to judge; each piece that has its own gradient, against it."""

import ast
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from reference.transformer import attention, kept_values, rms_norm, rotate
from spmdkit.models.attention import causal_attention
from spmdkit.models.attention import rotate as rotate_heads
from spmdkit.models.layers import cross_entropy, dropout
from spmdkit.models.layers import rms_norm as our_rms_norm
from spmdkit.models.moe import MixtureOfExperts, MoEConfig
from spmdkit.models.transformer import WHOLE, _swiglu
from spmdkit.models.transformer_config import TransformerConfig
from spmdkit.parallel.xla.product import product, weight_first

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


@pytest.mark.parametrize(("width", "columns"), [(4, 5), (5, 4), (4, 4)])
def test_product(width, columns, float64):
    """The gradient of the matrix is written in two ways: one where it has more rows than columns."""
    assert_same(product, lambda x, w: jnp.einsum("bld,df->blf", x, w), normal(2, 3, width), normal(width, columns))


def test_weight_first(float64):
    x, weight = normal(3, 4), normal(4, 2)
    assert_same(lambda x, w: jnp.matmul(*weight_first(x, w)), lambda x, w: x @ w, x, weight)


@pytest.mark.parametrize(
    ("length", "heads", "kv_heads"), [(1, 4, 4), (63, 4, 2), (66, 4, 2), (128, 3, 1), (130, 4, 4), (300, 4, 2)]
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


def test_rotation(float64):
    position = jnp.asarray([[0, 1, 2, 0, 1], [3, 4, 5, 6, 7]])
    assert_same(
        lambda x: rotate_heads(x, 100.0, position),
        lambda x: jnp.stack(
            [rotate(x[:, :, h], position, TransformerConfig(rope_base=100.0)) for h in range(3)], axis=2
        ),
        normal(2, 5, 3, 4),
    )


def test_rms_norm(float64):
    x, scale = normal(2, 3, 4), normal(4)
    assert_same(lambda x, s: our_rms_norm(x, s, 1e-2), lambda x, s: rms_norm(x, s, 1e-2), x, scale)


def test_swiglu(float64):
    assert_same(_swiglu, lambda gate, up: gate / (1 + jnp.exp(-gate)) * up, normal(2, 3, 4), normal(2, 3, 4))


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


def test_cross_entropy(float64):
    targets, weights = RANDOM.integers(0, 7, (2, 3)).astype(np.int32), RANDOM.random((2, 3))
    plain = reference.transformer.cross_entropy
    assert_same(
        lambda x: cross_entropy(x, targets, weights), lambda x: plain(x, targets, weights), 20 * normal(2, 3, 7)
    )


@pytest.mark.slow_cases("1", "2")
@pytest.mark.parametrize("top_k", [1, 2])
def test_router(top_k, float64):
    """Gates and losses, and their gradients by the router's matrix and by what it reads; choices are in test_moe.py."""
    config = MoEConfig(experts=4, top_k=top_k, capacity_factor=0.75, auxiliary_loss=0.5, z_loss=0.25)
    router, x = normal(6, 4), normal(2, 10, 6)

    def ours(router, x):
        routing = MixtureOfExperts(config, WHOLE).route(router, x)
        return routing.gate_BLk, routing.loss_B

    assert_same(ours, lambda *own: reference.mixture.route(config, *own)[1::2], router, x)


# The optimizer


@pytest.mark.slow
def test_adamw_and_clipping(float64):
    """NumPy's steps are those of optax."""
    shapes = {"a": (3, 4), "b": (2,)}
    params = {name: np.asarray(normal(*shape)) for name, shape in shapes.items()}
    chain = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, weight_decay=0.1))
    mine, theirs, state, adamw = params, params, chain.init(params), reference.AdamW(params, rate=1e-2, decay=0.1)
    for _ in range(3):
        gradients = {name: np.asarray(normal(*shape)) for name, shape in shapes.items()}
        updates, state = chain.update(gradients, state, theirs)
        theirs = optax.apply_updates(theirs, updates)
        mine = adamw.update(mine, reference.clip(gradients, 0.5)[0])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), mine, theirs)
