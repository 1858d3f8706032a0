"""Equinox: a module for one row, called under `jax.vmap`; its floating-point arrays are the parameters.

    params    arrays of floating-point numbers           state    the leaves of `equinox.nn.State`, by number
    call      jax.vmap(module, axis_name=...)(inputs, [state], key=one key for each row)

A batch norm names the axis of that `vmap`. The runtime binds that name, and adds the rows of all devices: JAX sums over
an axis of `vmap` and one of a mesh one after the other, so the layer's `lax.pmean` is replaced by both. JAX cannot do
this while it checks what varies over the mesh, so such a step is compiled without that check, with a log line.
"""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import jax
from jax import Array, lax

from ...layouts.paths import leaves_with_paths, nest
from ...mesh.compat import varying_axes
from ...mesh.errors import UserError
from .adapted import Adapted, Rows, as_arguments, check_arguments, mode_arguments

AXIS = "batch"
"""The axis of rows if no layer names one."""


def adapt_equinox(module: Any, inputs: Any) -> Adapted:
    """Adapts an Equinox module.

    Args:
        module: An `equinox.Module` for one row, a pair (module, state), or a function of `key` that makes either. Its
            `__call__` takes inputs and, if it has one, a state; and `key` if it draws. A module that still contains its
            first state, as its class makes it, is split from it here.
        inputs: Its inputs for one row.
    """
    import equinox

    is_module = isinstance(module, equinox.Module | tuple)

    def parts(key: Array) -> tuple[Any, Any, Any, Any]:
        """Returns parameters, the rest of the module, leaves of the state, and its structure."""
        made = _with_state(equinox, module if is_module else module(key=key))
        model, state = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        if not isinstance(model, equinox.Module):
            raise UserError(
                f"The function of key returned a {type(model).__name__}. Return an equinox.Module, or a pair (module, "
                "state)."
            )
        params, rest = equinox.partition(model, equinox.is_inexact_array)
        return params, rest, *jax.tree.flatten(state)

    fixed: list[Any] = []

    def init(key: Array) -> tuple[Any, Any]:
        params, rest, leaves, structure = parts(key)
        arrays, static = equinox.partition(rest, equinox.is_array)
        if jax.tree.leaves(arrays):
            raise UserError(
                "This Equinox module has arrays outside of its state that are not floating-point. Layers that "
                "have a state, such as batch norm, need __call__(self, x, state) -> (outputs, state); other arrays "
                "belong in a static field, as NumPy arrays."
            )
        named = dict(leaves_with_paths(params))
        fixed[:] = [static, structure, jax.tree.structure(params), list(named)]
        return nest(named), {str(number): leaf for number, leaf in enumerate(leaves)}

    keeps_state = bool(jax.eval_shape(init, jax.eval_shape(jax.random.key, 0))[1])
    static, state_structure, params_structure, paths = fixed
    check_arguments(static, (*as_arguments(inputs), *[None] * keeps_state), more=("key",))

    def call(params: Any, state: Any, inputs: Any, rows: Rows) -> tuple[Any, Any]:
        leaves = dict(leaves_with_paths(params))
        model = equinox.combine(jax.tree.unflatten(params_structure, [leaves[path] for path in paths]), static)
        model = model if rows.training else equinox.nn.inference_mode(model)
        given = [state[str(number)] for number in range(len(state))]
        taken = (jax.tree.unflatten(state_structure, given),) * keeps_state
        mode = mode_arguments(type(model).__call__, rows.training)
        draws = "key" in inspect.signature(type(model).__call__).parameters
        keys = jax.vmap(lambda index: jax.random.fold_in(rows.any_key, index))(rows.example)

        def one(x: Any, key: Array) -> Any:
            return model(*as_arguments(x), *taken, **({"key": key} if draws else {}), **mode)

        axis = _axis_of(equinox, model)
        with _over_mesh(equinox, axis, rows.axes):
            mapped = jax.vmap(one, axis_name=axis, out_axes=(0, None) if keeps_state else 0)
            result = mapped(inputs, keys)
        if not keeps_state:
            return result, state
        outputs, after = result
        return outputs, {str(number): leaf for number, leaf in enumerate(jax.tree.leaves(after))}

    return Adapted(init, call)


def _with_state(equinox: Any, made: Any) -> Any:
    """Returns a module with its first state, if its layers have one, as `equinox.nn.make_with_state` does."""
    if isinstance(made, tuple) or "state" not in inspect.signature(type(made).__call__).parameters:
        return made
    model, state = equinox.nn.make_with_state(lambda: made)()
    return (model, state) if jax.tree.leaves(state) else made


def _axis_of(equinox: Any, model: Any) -> str:
    """Returns the axis over which the module's batch norms sum."""
    is_norm = lambda leaf: isinstance(leaf, equinox.nn.BatchNorm)  # noqa: E731
    norms = [leaf for leaf in jax.tree.leaves(model, is_leaf=is_norm) if is_norm(leaf)]
    names = {norm.axis_name for norm in norms}
    if len(names) > 1 or any(not isinstance(name, str) for name in names):
        raise UserError(
            f"The batch norms of this Equinox module name the axes {sorted(map(str, names))}; they must "
            f"name the same one."
        )
    return names.pop() if names else AXIS


@contextmanager
def _over_mesh(equinox: Any, axis: str, axes: tuple[str, ...]) -> Iterator[None]:
    """Makes batch norm compute statistics over the rows of all devices."""
    home = sys.modules[equinox.nn.BatchNorm.__module__]
    before = getattr(home, "lax", None)
    if before is None and axes:
        raise UserError("The batch norm of this version of Equinox cannot be summed over devices. Use group norm.")

    def pmean(x: Any, axis_name: Any, **options: Any) -> Any:
        """Returns the mean over the rows of this device, then over devices, which have equally many."""
        if varying_axes(x):
            raise ValueError(f"JAX cannot sum over the axis {axis_name!r} of a vmap beside varying manual axes")
        mean = lax.pmean(x, axis_name, **options)
        return lax.pmean(mean, axes) if axis_name == axis and axes else mean

    home.lax = SimpleNamespace(**{**vars(lax), "pmean": pmean})  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        home.lax = before  # pyright: ignore[reportAttributeAccessIssue]
