"""What is promised in float32 where parameters and activations are bfloat16: no error but that of the last rounding.

Inputs are bfloat16 numbers. What is right for them is computed by the reference in float64.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from reference.transformer import attention, rms_norm, rotate
from spmdkit.models.attention import causal_attention
from spmdkit.models.attention import rotate as rotate_heads
from spmdkit.models.layers import rms_norm as our_rms_norm
from spmdkit.models.moe import MixtureOfExperts, MoEConfig, moe
from spmdkit.models.transformer import WHOLE, TransformerConfig, transformer

HALF_STEP = 2.0**-8
"""Largest relative error of rounding once to bfloat16."""
SINGLE = 1e-5


def numbers(*shape, scale=1.0, seed=0):
    random = np.random.default_rng([seed, *shape])
    return jnp.asarray(scale * random.normal(size=shape), jnp.bfloat16)


def exact(function, *arguments):
    """In float64, from the same numbers."""
    with jax.enable_x64(True):
        return np.asarray(jax.jit(function)(*(jnp.asarray(np.float64(argument)) for argument in arguments)))


def worst(found, expected):
    """The largest error, relative to each value."""
    return np.max(np.abs(np.float64(found) - expected) / np.abs(expected))


def test_a_norm_is_rounded_once():
    x, scale = numbers(4, 8, 64, scale=30.0), numbers(64)
    found = jax.jit(lambda: our_rms_norm(x, scale, 1e-5))()
    assert found.dtype == jnp.bfloat16
    assert worst(found, exact(lambda x, s: rms_norm(x, s, 1e-5), x, scale)) < HALF_STEP * 1.001


def test_the_gradient_of_a_norm_is_rounded_once():
    """Of its scale too, a sum over all positions."""
    x, scale, direction = numbers(8, 128, 16), numbers(16), numbers(8, 128, 16, seed=1)

    def gradients(norm):
        return lambda x, scale, direction: jax.vjp(norm, x, scale)[1](direction)

    found = jax.jit(gradients(lambda x, s: our_rms_norm(x, s, 1e-5)))(x, scale, direction)
    for which, mine in enumerate(found):
        right = exact(lambda *a, i=which: gradients(lambda x, s: rms_norm(x, s, 1e-5))(*a)[i], x, scale, direction)
        assert np.abs(np.float64(mine) - right).max() < 2 * HALF_STEP * np.abs(right).max()
        assert np.median(np.abs(np.float64(mine) - right) / np.abs(right)) < HALF_STEP


def test_a_rotation_is_rounded_once():
    x, position = numbers(1, 300, 1, 4), np.arange(300)[None]
    found = jax.jit(lambda: rotate_heads(x, 10000.0))()
    right = exact(lambda x: rotate(x[:, :, 0], position, TransformerConfig(rope_base=10000.0)), x)[:, :, None]
    assert np.abs(np.float64(found) - right).max() < HALF_STEP * np.abs(right).max()


def test_scores_and_softmax_are_wide():
    """Scores of a hundred: a softmax of rounded ones would be off by a third. Only weights and result are rounded."""
    query, key, value = (numbers(1, 40, 2, 8, scale=scale, seed=seed) for seed, scale in enumerate((12.0, 12.0, 1.0)))

    def plain(query, key, value):
        return jnp.stack([attention(query[:, :, h], key[:, :, h], value[:, :, h]) for h in range(2)], axis=2)

    found = jax.jit(causal_attention)(query, key, value)
    assert found.dtype == jnp.bfloat16
    assert np.abs(np.float64(found) - exact(plain, query, key, value)).max() < 3 * HALF_STEP * np.abs(value).max()


def test_a_router_is_wide():
    config = MoEConfig(experts=4, top_k=2, auxiliary_loss=0.5, z_loss=0.25)
    router, x = numbers(64, 4), numbers(2, 10, 64)
    found = jax.jit(lambda: MixtureOfExperts(config, WHOLE).route(router, x))()
    for mine, place in ((found.gate_BLk, 1), (found.loss_B, 3)):
        assert mine.dtype == jnp.float32
        assert worst(mine, exact(lambda r, x, i=place: reference.mixture.route(config, r, x)[i], router, x)) < SINGLE


NARROW = ("exp", "exp2", "expm1", "log", "log1p", "rsqrt", "sqrt", "tanh", "sin", "cos", "pow", "integer_pow")
NARROW += ("reduce_sum", "reduce_max", "reduce_min", "cumsum", "argmax", "top_k", "sort")
"""What no number of 16 bits goes through. Products of matrices, silu, sums of two and moving may be narrow."""


def operations(jaxpr):
    """Every operation of a program, those of the functions it calls too."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for each in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(each, "jaxpr", each)
                if hasattr(inner, "eqns"):
                    yield from operations(inner)


SIZES = {"vocabulary": 23, "length": 6, "layers": 1, "width": 16, "heads": 4, "kv_heads": 2, "mlp_width": 24}


@pytest.mark.slow_cases("moe", "transformer")
@pytest.mark.parametrize(
    "model",
    [
        transformer(TransformerConfig(**SIZES, dropout=0.1)),
        transformer(TransformerConfig(**SIZES, tied=True)),
        moe(MoEConfig(**SIZES, dropout=0.1)),
    ],
    ids=["transformer", "tied", "moe"],
)
def test_nothing_else_is_computed_in_16_bits(model):
    """In the whole program of loss and gradients; scores and logits are products that end in float32."""
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), shapes)
    tokens = jnp.zeros((2, 6), jnp.int32)
    batch = {"inputs": tokens, "targets": tokens, "weights": jnp.ones((2, 6)), "example": tokens[:, 0]}

    def loss(params):
        return model.loss(params, batch, jax.random.key(0))

    found = list(operations(jax.make_jaxpr(jax.value_and_grad(loss, has_aux=True))(params).jaxpr))
    narrow = {
        equation.primitive.name
        for equation in found
        if equation.primitive.name in NARROW
        and any(getattr(each.aval, "dtype", None) == jnp.bfloat16 for each in equation.invars)
    }
    assert narrow == set()
    products = [equation.outvars[0].aval for equation in found if equation.primitive.name == "dot_general"]
    assert {product.dtype for product in products if 23 in product.shape} == {jnp.dtype("float32")}
    assert any(product.dtype == jnp.float32 and product.shape[-1] == 6 for product in products), "the scores"
