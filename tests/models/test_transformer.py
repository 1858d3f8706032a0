"""The transformer against a plain one, written without stacking, folding, slicing or rematerialisation."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from spmdkit.models.transformer import TransformerConfig, transformer
from support.small_transformers import SMALL, VARIANTS, first_params, make_batch


def make_params(config, dtype="float32"):
    """NumPy parameters with every scale away from 1."""
    leaves, treedef = jax.tree.flatten(first_params(replace(config, length=1, scan_unroll=1, dropout=0.0)))
    noise = np.random.default_rng(0)
    return treedef.unflatten([(leaf + 0.1 * noise.normal(size=leaf.shape)).astype(dtype) for leaf in leaves])


def packed(batch):
    """Two documents in each row, the first of 4 positions."""
    shape = batch["inputs"].shape
    position = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    first = position < 4
    return {**batch, "segments": (~first).astype(np.int32), "positions": np.where(first, position, position - 4)}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_loss_and_gradients_are_those_of_the_plain_one(name, float64):
    """In training with dropout; in evaluation, where a row holds two documents."""
    config = replace(VARIANTS[name], dropout=0.3)
    params, batch, key = make_params(config, "float64"), make_batch(config, rows=2), jax.random.key(5)
    model, plain = transformer(config), reference.transformer
    np.testing.assert_allclose(
        jax.jit(model.predict)(params, packed(batch)),
        plain.logits(config, params, packed(batch)),
        rtol=1e-10,
        atol=1e-10,
    )
    (total, weight), gradients = jax.jit(jax.value_and_grad(lambda p, b: model.loss(p, b, key), has_aux=True))(
        params, batch
    )
    assert (total.dtype, weight.dtype) == (jnp.float64, jnp.float64)
    sums, expected = plain.differentiate(config, params, batch, key)
    np.testing.assert_allclose((total, weight), sums, rtol=1e-11)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11), gradients, expected)


@pytest.mark.slow
def test_computes_in_bfloat16_but_for_the_loss():
    params, batch = make_params(SMALL), make_batch(SMALL)
    cast = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), params)
    model = transformer(SMALL)
    block_params = jax.tree.map(lambda leaf: leaf[0], cast["blocks"])
    hidden = jax.eval_shape(lambda: model.block(block_params, model.embed(cast, batch, None), None))["hidden"]
    assert hidden.dtype == jnp.bfloat16
    differentiate = jax.jit(jax.value_and_grad(lambda p: model.loss(p, batch, None), has_aux=True))
    (total, weight), gradients = differentiate(cast)
    assert (total.dtype, weight.dtype) == (jnp.float32, jnp.float32)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(gradients))
    np.testing.assert_allclose((total, weight), reference.transformer.loss(SMALL, params, batch), rtol=0.05)


def test_a_token_outside_the_vocabulary_is_not_another_token():
    batch = make_batch(SMALL)
    batch["inputs"][0, 0] = SMALL.vocabulary
    total, _ = jax.jit(transformer(SMALL).loss)(make_params(SMALL), batch, None)
    assert np.isnan(total)


def test_learned_positions_begin_again_in_each_document():
    config = replace(SMALL, positions="learned")
    batch, table = packed(make_batch(config)), np.random.default_rng(0).normal(size=(config.length, config.width))
    tokens = np.zeros((config.vocabulary, config.width))
    x = transformer(config).embed({"embed": {"tokens": tokens, "positions": table}}, batch, None)
    np.testing.assert_allclose(x["hidden"], table[batch["positions"]], rtol=1e-6)


# Dropout


DROPPED = replace(SMALL, dropout=0.3)


def test_blocks_and_steps_drop_different_values():
    model, params, batch = transformer(DROPPED), make_params(DROPPED), make_batch(DROPPED)
    x = {"hidden": jnp.ones((3, SMALL.length, SMALL.width)), "example": batch["example"]}
    block_params = jax.tree.map(lambda leaf: leaf[0], params["blocks"])
    block = jax.jit(model.block)
    first, second = (block(block_params, x, jax.random.key(seed))["hidden"] for seed in (0, 1))
    assert (first != second).any()


def test_rejects_missing_vocabulary_and_length():
    with pytest.raises(ValueError, match=r"model.vocabulary is missing.*\nmodel.length is missing"):
        transformer(TransformerConfig())


@pytest.mark.parametrize("name", ["multi-query, tied", "qwen", "multi-head, gpt"])
def test_first_parameters_are_those_of_the_plain_one(name):
    config = replace(VARIANTS[name], layers=3)
    expected = reference.transformer.init(config, jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, first_params(config), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mlp": "swigl"}, r"model\.mlp='swigl' must be one of swiglu, gelu"),
        ({"heads": 0}, r"model\.heads=0 must be at least 1\."),
        ({"dropout": 1.0}, r"model\.dropout=1\.0 must be less than 1"),
    ],
)
def test_rejects_invalid_options_from_python(options, message):
    with pytest.raises(ValueError, match=message):
        TransformerConfig(**options)
