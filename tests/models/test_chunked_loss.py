"""The loss of a large vocabulary in chunks: the same numbers as from whole logits, on one device and on a mesh."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from spmdkit.models import TransformerConfig, layers, transformer
from spmdkit.models.layers import chunked_cross_entropy, count_chunks, cross_entropy
from spmdkit.parallel import census
from support import toy

ROWS, LENGTH, WIDTH, VOCABULARY = 2, 32, 16, 64
BATCH = toy.batch(0, length=16, vocabulary=96)


def inputs(dtype, VOCABULARY=VOCABULARY):
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (ROWS, LENGTH, WIDTH), dtype)
    table = jax.random.normal(keys[1], (WIDTH, VOCABULARY), dtype)
    targets = jax.random.randint(keys[2], (ROWS, LENGTH), 0, VOCABULARY)
    return x, table, targets, jax.random.uniform(keys[3], (ROWS, LENGTH), jnp.float32)


def whole_loss(x, table, targets, weights):
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return cross_entropy(jnp.einsum("BLD,DV->BLV", x, table, preferred_element_type=wide), targets, weights)


@pytest.mark.parametrize(("chunks", "vocabulary"), [(2, 64), (8, 64), (32, 64), (8, 61)])
def test_equals_loss_of_whole_logits(chunks, vocabulary, float64):
    x, table, targets, weights = inputs(jnp.float64, vocabulary)

    def gradients(function, *more):
        return jax.jit(jax.value_and_grad(lambda *each: 3.0 * function(*each, targets, weights, *more)[0], (0, 1)))

    whole = gradients(whole_loss)(x, table)
    in_chunks = gradients(chunked_cross_entropy, chunks)(x, table)
    for found, expected in zip(jax.tree.leaves(in_chunks), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
    total, weight = chunked_cross_entropy(x, table, targets, weights, chunks)
    np.testing.assert_allclose((total, weight), whole_loss(x, table, targets, weights), rtol=1e-12)


def test_sums_gradient_of_table_in_float32():
    """In bfloat16, the sum of many chunks would lose digits: with one position in each, the error stays that of one."""
    x, table, targets, weights = inputs(jnp.bfloat16)

    def gradient(function, x, table, *more):
        loss = jax.jit(jax.grad(lambda table: function(x, table, targets, weights, *more)[0]))
        return np.asarray(loss(table), np.float32)

    exact = gradient(whole_loss, x.astype(jnp.float32), table.astype(jnp.float32))
    assert toy.relative(gradient(chunked_cross_entropy, x, table, LENGTH), exact) < 2**-7


def test_never_holds_whole_logits():
    x, table, targets, weights = inputs(jnp.float32)
    for function in (chunked_cross_entropy, jax.grad(lambda *each: chunked_cross_entropy(*each)[0], argnums=(0, 1))):
        program = jax.jit(function, static_argnums=4).lower(x, table, targets, weights, 8).as_text()
        assert f"tensor<{ROWS}x{LENGTH // 8}x{VOCABULARY}xf32>" in program
        assert f"{LENGTH}x{VOCABULARY}x" not in program


def test_never_holds_whole_logits_of_half_the_vocabulary(monkeypatch):
    for name in ("MIN_LOGITS_BYTES", "MAX_LOGITS_BYTES"):
        monkeypatch.setattr(layers, name, 16 * 2 * VOCABULARY * 4)
    config = TransformerConfig(vocabulary=VOCABULARY, length=16, layers=1, width=16, heads=2, mlp_width=48)
    batch = toy.abstract(toy.batch(0, rows=16, length=16))
    program = str(toy.build({"tensor": 2}, model=transformer(config)).trace(batch).jaxpr)
    assert f"f32[16,4,{VOCABULARY // 2}]" in program
    assert f"16,16,{VOCABULARY // 2}]" not in program


@pytest.mark.parametrize(("vocabulary", "width"), [(61, 128), (136, 136)])
def test_products_have_aligned_rows(vocabulary, width):
    x, table, targets, weights = inputs(jnp.bfloat16, vocabulary)
    gradients = jax.grad(lambda *each: chunked_cross_entropy(*each, targets, weights, 8)[0], argnums=(0, 1))
    program = jax.jit(gradients).lower(x, table).as_text()
    products = [line for line in program.splitlines() if "dot_general" in line]
    assert len(products) == 3
    assert all(f"x{width}x" in line for line in products)


@pytest.mark.parametrize(
    ("rows", "length", "vocabulary", "dtype", "chunks"),
    [
        (2, 8192, 128_256, jnp.bfloat16, 8),
        (1, 4096, 128_256, jnp.bfloat16, 2),
        (1, 2048, 128_256, jnp.bfloat16, 1),
        (16, 128, 256, jnp.float32, 0),
        (2, 8192, 128_256, jnp.float16, 0),
        (4096, 7, 128_256, jnp.bfloat16, 7),
    ],
)
def test_chooses_chunks_from_sizes(rows, length, vocabulary, dtype, chunks):
    assert count_chunks(rows, length, vocabulary, dtype) == chunks


def small(tied):
    return transformer(TransformerConfig(vocabulary=96, length=16, layers=2, width=16, heads=4, tied=tied))


@cache
def from_whole_logits(tied):
    """Parameters, and the mean loss and its gradients on one device."""
    return toy.on_one_device(small(tied), BATCH, "float64")


@pytest.mark.parametrize(
    ("strategy", "tied"),
    [
        ({"data": 2, "fsdp": 4}, True),
        ({"fsdp": 2, "context": 2, "data": 2}, False),
        ({"pipe": {"size": 2, "microbatches": 2}, "fsdp": 4}, True),
        ({"tensor": 2, "context": 2, "fsdp": 2}, False),
        ({"pipe": {"size": 2, "microbatches": 2}, "tensor": 4}, True),
    ],
    ids=str,
)
@pytest.mark.slow
def test_same_step_on_a_mesh(strategy, tied, float64, monkeypatch):
    params, loss, gradients = from_whole_logits(tied)
    for limit in ("MAX_LOGITS_BYTES", "MIN_LOGITS_BYTES"):
        monkeypatch.setattr(layers, limit, 96 * 8 * 4)
    step = toy.build(strategy, optax.sgd(1.0), small(tied), precision=toy.FLOAT64)
    program, state = step.compile(toy.abstract(BATCH)).as_text(), step.init(0, params)
    total, weight = step.evaluate(state.params, BATCH)
    state, metrics = step(state, BATCH)
    found = jax.tree.map(np.subtract, params, state.params), metrics.loss, total / weight
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12), found, (gradients, loss, loss))
    assert census(program, step.plan.mesh) == step.cost(toy.abstract(BATCH))
