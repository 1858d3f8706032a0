"""Flax Linen: `module.init` and `module.apply`, with "batch_stats" and other collections as the state.

In training, `linen.intercept_methods` makes batch norm sum its statistics over the rows of all devices, and dropout
draw a mask for each row. An argument `train`, `training`, `is_training`, `deterministic` or `use_running_average` of
the module's `__call__` is set to the mode, training or evaluation.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

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

PARAMS, INTERMEDIATES = "params", "intermediates"


def adapt_linen(module: Any, inputs: Any) -> Adapted:
    """Adapts a Linen module.

    Args:
        module: A `flax.linen.Module`.
        inputs: Its inputs for one row, as arrays or shapes.
    """
    from flax import linen
    from flax.core import meta

    check_arguments(module, inputs)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), inputs)
    evaluated = mode_arguments(type(module).__call__, training=False)

    def first_variables(key: Array) -> dict[str, Any]:
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return dict(meta.unbox(module.init(key, *as_arguments(zeros), **evaluated)))  # logical axes are not needed

    def collect(key: Array, example: Array) -> Any:
        """Returns all collections after a training call that keeps what the module sows."""
        rows, zeros = Rows(key=key, example=example, axes=()), jax.tree.map(jnp.zeros_like, shapes)
        more = mode_arguments(type(module).__call__, training=True)
        keys = {"dropout": key, PARAMS: key}
        with _on_mesh(rows):
            return module.apply(
                first_variables(key), *as_arguments(zeros), rngs=keys, mutable=linen.DenyList(PARAMS), **more
            )[1]

    abstract = abstract_rows()
    sown: list[str] = []
    with suppress(Exception):  # the check of the model's functions reports an error of the call
        sown = _sown_paths(jax.eval_shape(collect, abstract.key, abstract.example))

    def init(key: Array) -> tuple[Any, Any]:
        variables = first_variables(key)
        return variables.pop(PARAMS, {}), _without(variables, sown)

    def call(params: Any, state: Any, inputs: Any, rows: Rows) -> tuple[Any, Any]:
        variables, more = {PARAMS: params, **(state or {})}, mode_arguments(type(module).__call__, rows.training)
        inputs = as_arguments(inputs)
        rngs = {"dropout": rows.any_key, PARAMS: rows.any_key}  # the second is that of all other names
        if not rows.training:
            return module.apply(variables, *inputs, rngs=rngs, mutable=list(state or ()), **more)[0], state
        with _on_mesh(rows):
            if not state:
                return module.apply(variables, *inputs, rngs=rngs, **more), state
            outputs, changed = module.apply(variables, *inputs, rngs=rngs, mutable=list(state), **more)
        return outputs, {**state, **changed}

    losses = [path for path in sown if not path.startswith(f"{INTERMEDIATES}/") or is_loss(path)]
    return Adapted(init, call, losses)


def _sown_paths(tree: Any, above: str = "") -> list[str]:
    """Returns the paths of what a module has sown: tuples, and everything in a collection with the name of a loss."""
    if isinstance(tree, tuple):
        return [above]
    if not isinstance(tree, Mapping):
        return [above] if is_loss(above.partition("/")[0]) else []
    return [path for name, each in tree.items() for path in _sown_paths(each, f"{above}/{name}".lstrip("/"))]


def _without(tree: Any, paths: Sequence[str], above: str = "") -> dict[str, Any]:
    """Returns the collections without some paths, and without mappings that are then empty."""
    kept = {}
    for name, each in tree.items():
        path = f"{above}/{name}".lstrip("/")
        if path in paths:
            continue
        inner = _without(each, paths, path) if isinstance(each, Mapping) else each
        if not isinstance(each, Mapping) or inner or not each:
            kept[name] = inner
    return kept


def _on_mesh(rows: Rows) -> Any:
    """Makes layers that combine rows work on the whole batch."""
    from flax import linen

    def intercept(next_call: Callable[..., Any], arguments: Any, options: Any, context: Any) -> Any:
        module = context.module
        if context.method_name != "__call__":
            return next_call(*arguments, **options)
        if isinstance(module, linen.BatchNorm) and not _option(module, "use_running_average", arguments, options):
            object.__setattr__(module, "axis_name", rows.axes or None)
        if isinstance(module, linen.Dropout) and not _option(module, "deterministic", arguments, options):
            key = module.make_rng(module.rng_collection)
            return drop(arguments[0], module.rate, key, rows.example, module.broadcast_dims)
        return next_call(*arguments, **options)

    return linen.intercept_methods(intercept)


def _option(module: Any, name: str, arguments: Any, options: Any) -> bool:
    """Returns an option of a layer, from its construction or its call."""
    given = options.get(name, arguments[1] if len(arguments) > 1 else None)
    return bool(getattr(module, name) if given is None else given)
