"""Flax NNX: a module is split into its parameters, its other variables, and its structure.

    params    nnx.Param                                  state    every other variable, except random keys and counts
    call      merge; model.train() or model.eval(); keys folded from the step's; model(inputs), with rngs= if it has
              that argument; split again

In training, batch norm sums its statistics over the rows of all devices, and dropout draws a mask for each row. Both
are set on the merged copy of one call.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ...layouts.paths import leaves_with_paths
from ...mesh.errors import UserError
from ...parallel.model.user_options import takes_option
from .adapted import (
    Adapted,
    Rows,
    abstract_rows,
    as_arguments,
    check_arguments,
    drop,
    is_loss,
    mode_arguments,
)


def adapt_nnx(module: Any, inputs: Any) -> Adapted:
    """Adapts an NNX module.

    Args:
        module: A `flax.nnx.Module`, or a function of `rngs` that makes one.
        inputs: Its inputs for one row.
    """
    from flax import nnx

    is_module = isinstance(module, nnx.Module)

    def split(model: Any) -> list[Any]:
        return list(nnx.split(model, nnx.Param, (nnx.RngKey, nnx.RngCount), ...))

    def made(key: Array) -> Any:
        model = module if is_module else module(rngs=nnx.Rngs(params=key, default=jax.random.fold_in(key, 1)))
        if not isinstance(model, nnx.Module):
            raise UserError(f"The function of rngs returned a {type(model).__name__}. Return a flax.nnx.Module.")
        return model

    abstract = module if is_module else nnx.eval_shape(lambda: made(jax.random.key(0)))
    check_arguments(abstract, inputs, more=("rngs",))
    graph, *variables = split(abstract)
    random = nnx.to_pure_dict(variables[1])

    def init(key: Array) -> tuple[Any, Any]:
        _, params, _, others = split(made(key))
        return nnx.to_pure_dict(params), nnx.to_pure_dict(others)

    def call(params: Any, state: Any, inputs: Any, rows: Rows) -> tuple[Any, Any]:
        outputs, model = run(params, state, inputs, rows)
        if not rows.training or not state:
            return outputs, state
        return outputs, _restricted(nnx.to_pure_dict(split(model)[3]), state)

    def run(params: Any, state: Any, inputs: Any, rows: Rows) -> tuple[Any, Any]:
        """Returns the outputs, and the merged module after the call."""
        filled = [jax.tree.map(lambda leaf: leaf, each) for each in variables]
        for each, values in zip(filled, (params, _random(random, rows.any_key), state or {}), strict=True):
            nnx.replace_by_pure_dict(each, values)
        model = nnx.merge(graph, *filled)
        if not rows.training:
            model.eval()
            return model(*as_arguments(inputs), **mode_arguments(type(model).__call__, training=False)), model
        model.train()
        given: dict[str, Any] = mode_arguments(type(model).__call__, training=True)
        if takes_option(type(model).__call__, "rngs"):
            given["rngs"] = nnx.Rngs(rows.key)
        _set_on_mesh(nnx, model, rows)
        return model(*as_arguments(inputs), **given), model

    found: list[str] = []

    def collect(key: Array, example: Array) -> None:
        """Finds the losses that a training call sows."""
        params, state = init(key)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), inputs)
        _, model = run(params, state, zeros, Rows(key=key, example=example, axes=()))
        before = {path for path, _ in leaves_with_paths(state)}
        for names, variable in nnx.to_flat_state(split(model)[3]):
            path = "/".join(map(str, names))
            is_new = not any(each == path or each.startswith(f"{path}/") for each in before)
            if is_new and (type(variable) is not nnx.Intermediate or is_loss(path)):
                found.append(path)

    rows = abstract_rows()
    with suppress(Exception):  # the check of the model's functions reports an error of the call, for a device's rows
        jax.eval_shape(collect, rows.key, rows.example)
    return Adapted(init, call, found)


def _restricted(tree: Any, like: Any) -> Any:
    """Returns a nested mapping with the keys of another one: without what a call has sown."""
    if not isinstance(like, Mapping):
        return tree
    return {name: _restricted(tree[name], each) for name, each in like.items()}


def _random(like: Any, key: Array) -> Any:
    """Returns the keys of a module, folded from that of the step, and their counts from 0."""
    leaves, structure = jax.tree.flatten(like)

    def filled(number: int, leaf: Any) -> Array:
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return jax.random.fold_in(key, number) if is_key else jnp.zeros(leaf.shape, leaf.dtype)

    return jax.tree.unflatten(structure, [filled(number, leaf) for number, leaf in enumerate(leaves)])


def _set_on_mesh(nnx: Any, model: Any, rows: Rows) -> None:
    """Makes layers that combine rows work on the whole batch."""

    class RowDropout(nnx.Dropout):
        """Dropout with a mask for each row."""

        def __call__(self, inputs: Any, *, deterministic: bool | None = None, rngs: Any = None) -> Any:
            if self.deterministic if deterministic is None else deterministic:
                return inputs
            stream = self.rngs if rngs is None else rngs
            stream = stream[self.rng_collection] if isinstance(stream, nnx.Rngs) else stream
            key = stream if isinstance(stream, Array) else stream()
            return drop(inputs, self.rate, key, rows.example, self.broadcast_dims)

    for _, layer in list(nnx.iter_modules(model)):
        if isinstance(layer, nnx.BatchNorm):
            layer.axis_name = rows.axes or None
        elif type(layer) is nnx.Dropout:
            layer.__class__ = RowDropout
