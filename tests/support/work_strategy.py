"""A strategy that splits the work of a model, added by one file: the columns of the first product of a block.

Syntax, for the MLP of a block with rows B, positions L and the axis `columns` of size N:

    forward    h[B, L, F_columns] = x[B, L, D] . Wi[D, F_columns]
               y[B, L, D] = all-reduce over columns of h[B, L, F_columns] . Wo[F_columns, D]
    backward   dx[B, L, D] = all-reduce over columns of dy[B, L, D]
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from spmdkit.parallel.collectives import Collective, Traffic, own_collectives, wire_bytes
from spmdkit.parallel.options import check_options
from spmdkit.parallel.plan import as_stored, no_problems, split_by_model, splits_nothing, summed_elsewhere, unchanged

from . import toy

AXIS = "columns"


@dataclass(frozen=True, kw_only=True)
class ColumnsConfig:
    """Options of the strategy `columns`."""

    size: int = 1
    """Devices over which the columns of a product are split."""

    def __post_init__(self):
        check_options(AXIS, self)


OPTIONS = ColumnsConfig
SPLITS = ("parameters", "work")
layout = partial(split_by_model, AXIS)
update_layout = splits_nothing
used_layout = as_stored
begin = finish = unchanged
reduce = summed_elsewhere
check = no_problems
cost = partial(own_collectives, AXIS)


def parallelize(parallel):
    """Returns the toy model with split columns."""
    size = parallel.added[AXIS].size

    def block(params, x, key):
        inner = jnp.tanh((x * params["scale"][None, None]) @ params["up"])
        return x + lax.psum(inner @ params["down"], AXIS)

    def head(groups, x, batch, key):
        total, weight = toy.head(groups, x, batch, key)
        return total / size, weight / size  # each device's share

    def traffic(part, shapes, dtype, platform):
        if part != "block":
            return Traffic()
        elements = toy.WIDTH * jax.tree.leaves(shapes)[0].shape[0] * toy.LENGTH
        line = Collective("all-reduce", (AXIS,), 1, elements * wire_bytes(dtype, platform))
        return Traffic((line,), (line,))

    rules = {"blocks/up": (None, None, AXIS), "blocks/down": (None, AXIS, None)}
    return replace(toy.BLOCK_MODEL, block=block, head=head, rules=rules, traffic=traffic)


MODEL = replace(toy.BLOCK_MODEL, parallelize=parallelize)
