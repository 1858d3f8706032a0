"""Keras 3 on its JAX backend: `stateless_call` of a layer or model, with variables by their paths.

    params    trainable variables                        state    the others, except seeds of random layers
    call      layer.stateless_call(params, state, inputs, training=...)

A given layer starts from its own values. In training, batch norm sums its statistics over the rows of all devices, and
dropout draws a mask for each row, from seeds folded from the step's key.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ...layouts.paths import leaves_with_paths, nest
from ...mesh.errors import UserError, counted
from .adapted import Adapted, Rows, abstract_rows, as_arguments, drop

SEEDS = "seed_generator_state"


def adapt_keras(module: Any, inputs: Any) -> Adapted:
    """Adapts a Keras layer or model.

    Args:
        module: A `keras.Layer` or `keras.Model`; it is built for `inputs` if it was not built yet.
        inputs: Its inputs for one row.

    Raises:
        UserError: Keras does not use the JAX backend.
    """
    import keras

    if keras.backend.backend() != "jax":
        raise UserError(
            f"Keras uses {keras.backend.backend()}, and only modules of its JAX backend can be trained. Set "
            "the environment variable KERAS_BACKEND=jax, or leave it unset and import spmdkit before keras."
        )
    if not module.built:
        module(*jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), _arguments(module, inputs)))
    trained = {variable.path: np.asarray(variable.value) for variable in module.trainable_variables}
    others = [variable.path for variable in module.non_trainable_variables]
    kept = {
        variable.path: np.asarray(variable.value)
        for variable in module.non_trainable_variables
        if not variable.path.endswith(SEEDS)
    }

    def init(key: Array) -> tuple[Any, Any]:
        return nest(jax.tree.map(jnp.asarray, trained)), nest(jax.tree.map(jnp.asarray, kept))

    def call(params: Any, state: Any, inputs: Any, rows: Rows) -> tuple[Any, Any]:
        trained_now, kept_now = (dict(leaves_with_paths(tree)) for tree in (params, state))

        def value(number: int, path: str) -> Array:
            if path in kept:
                return kept_now[path]
            bits = jax.random.bits(jax.random.fold_in(rows.any_key, number), (1,), "uint32")
            return jnp.concatenate([bits, jnp.zeros(1, "uint32")])

        given = [trained_now[path] for path in trained], [value(*each) for each in enumerate(others)]
        with _on_mesh(keras, module, rows):
            outputs, after = module.stateless_call(*given, *_arguments(module, inputs), training=rows.training)
        changed = {path: new for path, new in zip(others, after, strict=True) if path in kept}
        return outputs, nest(changed) if rows.training else state

    def collect(key: Array, example: Array) -> list[Array]:
        """Returns the losses that layers add in a training call: those of regularizers and of `add_loss`."""
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), inputs)
        given = (
            [*map(jnp.asarray, trained.values())],
            [jnp.asarray(each.value) for each in module.non_trainable_variables],
        )
        with _on_mesh(keras, module, Rows(key=key, example=example, axes=())):
            found = module.stateless_call(*given, *_arguments(module, zeros), training=True, return_losses=True)
        return found[-1]

    rows = abstract_rows()
    losses: list[Any] = []
    with suppress(Exception):  # the check of the model's functions reports an error of the call
        losses = jax.eval_shape(collect, rows.key, rows.example)
    left_out = [f"{counted(len(losses), 'loss', 'losses')} of regularizers or add_loss"] if losses else []
    return Adapted(init, call, left_out)


def _arguments(module: Any, inputs: Any) -> tuple[Any, ...]:
    """Returns the arguments of a module; a functional model takes its inputs as one list."""
    together = isinstance(inputs, tuple) and len(inputs) == len(getattr(module, "inputs", None) or ())
    return (list(inputs),) if together else as_arguments(inputs)


@contextmanager
def _on_mesh(keras: Any, module: Any, rows: Rows) -> Iterator[None]:
    """Makes layers that combine rows work on the whole batch."""
    layers = [*module._flatten_layers()] if rows.training else []
    changed = []
    for layer in layers:
        if isinstance(layer, keras.layers.BatchNormalization) and rows.axes:
            layer._moments = partial(_moments, layer, rows.axes)
            changed.append((layer, "_moments"))
        elif type(layer) is keras.layers.Dropout and layer.rate > 0:
            layer.call = partial(_dropout, layer, rows.example)
            changed.append((layer, "call"))
    try:
        yield
    finally:
        for layer, name in changed:
            del layer.__dict__[name]


def _moments(layer: Any, axes: tuple[str, ...], inputs: Any, mask: Any) -> tuple[Array, Array]:
    """Returns mean and variance over the rows of all devices."""
    if mask is not None:
        raise UserError(
            f"Layer {layer.name}: batch norm with a mask cannot be summed over devices. Leave the mask out."
        )
    mean = lax.pmean(jnp.mean(inputs, layer._reduction_axes, keepdims=True), axes)
    variance = lax.pmean(jnp.mean((inputs - mean) ** 2, layer._reduction_axes), axes)
    return jnp.squeeze(mean, tuple(layer._reduction_axes)), variance


def _dropout(layer: Any, example: Array, inputs: Any, training: bool = False) -> Any:
    if not training:
        return inputs
    key = jax.random.wrap_key_data(layer.seed_generator.next().astype("uint32"))
    shape = layer.noise_shape or (None,) * inputs.ndim
    return drop(inputs, layer.rate, key, example, [dim for dim, size in enumerate(shape) if size == 1])
