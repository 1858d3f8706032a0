"""Models for pipelines with their loss and gradients on one device, and schedules written as text."""

from functools import cache

import jax
import numpy as np
import reference
from spmdkit.models.transformer import transformer
from spmdkit.models.transformer_config import TransformerConfig
from spmdkit.parallel import BlockModel, Precision
from spmdkit.parallel.schedule.schedule_table import Action, Kind, Schedule
from support import toy

ROWS, LENGTH, VOCABULARY = 16, 8, 32
MAX_LAYERS = 9
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
    most = model(MAX_LAYERS, tied, dropout)
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


# two stages, two microbatches, GPipe's order; a gradient is passed on before its W
TWO = """
F0,F1,,B0,W0,B1,W1
,F0,B0,F1,B1,W0,W1
"""


def parse(text: str, **fields) -> Schedule:
    """A table as it is written, unchecked; short lines are padded."""
    kinds = dict(zip("FRBW", list(Kind)[1:], strict=True))
    cells = [line.split(",") for line in text.split()]
    ticks = max(map(len, cells))

    def action(cell: str) -> Action | None:
        number, _, chunk = cell[1:].partition(".")
        return Action(kinds[cell[0]], int(number), int(chunk or 0)) if cell else None

    by_stage = tuple(tuple(map(action, line + [""] * (ticks - len(line)))) for line in cells)
    fields = {"name": "mine", "stages": len(by_stage), "microbatches": 2, **fields}
    return Schedule(by_stage=by_stage, **fields)
