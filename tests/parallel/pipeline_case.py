"""Models for pipelines, their first parameters, and their loss and gradients on one device."""

from functools import cache

import jax
import numpy as np
import reference
import toy
from spmdkit.models.transformer import transformer
from spmdkit.models.transformer_config import TransformerConfig
from spmdkit.parallel import BlockModel, Precision

ROWS, LENGTH, VOCABULARY = 16, 8, 32
MOST_LAYERS = 9
FLOAT64 = Precision(params="float64", compute="float64", reduce="float64")
TOLERANCE = 1e-13


def model(layers, tied=False, dropout=0.0):
    """A transformer where there is dropout; elsewhere a lighter model, which compiles in less than half the time."""
    return transformer(sizes(layers, tied, dropout)) if dropout else light(layers, tied)


def sizes(layers, tied, dropout):
    """Those of the transformer."""
    given = {"vocabulary": VOCABULARY, "length": LENGTH, "width": 16, "heads": 4, "kv_heads": 2, "mlp_width": 32}
    return TransformerConfig(**given, layers=layers, tied=tied, dropout=dropout)


def light(layers, tied=False):
    """The pieces of `toy` with so many blocks, no two of them alike."""

    def init(key):
        blocks = jax.vmap(lambda key: toy.init(key)["blocks"])(jax.random.split(key, layers))
        own = {"blocks": jax.tree.map(lambda leaf: leaf[:, 0], blocks)}
        return toy.init(key) | own | ({"head": {}} if tied else {})

    return BlockModel(
        init=init,
        embed=toy.embed,
        block=toy.block,
        head=toy.tied_head if tied else toy.head,
        num_blocks=layers,
        head_reads=("embed", "head") if tied else ("head",),
    )


@cache
def drawn(tied, dropout):
    """Parameters of more blocks than any case has, on the host."""
    most = model(MOST_LAYERS, tied, dropout)
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), jax.jit(most.init)(jax.random.key(0)))


def first_params(layers, tied=False, dropout=0.0):
    params = drawn(tied, dropout)
    return {**params, "blocks": jax.tree.map(lambda leaf: leaf[:layers], params["blocks"])}


@cache
def one_device(layers, tied, dropout):
    """((sum of the loss, of the weights), gradients) in plain JAX on one device; with dropout those of key 1."""
    return differentiate(layers, tied, dropout, jax.random.key(1))


def differentiate(layers, tied, dropout, key):
    params, batch = first_params(layers, tied, dropout), toy.batch(3, ROWS)
    if dropout:
        return reference.transformer.differentiate(sizes(layers, tied, dropout), params, batch, key)
    own = model(layers, tied)
    return jax.jit(jax.value_and_grad(lambda params: own.loss(params, batch, None), has_aux=True))(params)
