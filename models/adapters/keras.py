"""Keras 3 on its JAX backend: `stateless_call` of a layer or model, its variables by their paths.

    params    trainable variables                        state    the others, but the seeds of random layers
    call      layer.stateless_call(params, state, inputs, training=...)

A layer that is there starts from its own values. What the runtime adds in training: batch norm sums its statistics over
the rows of all devices, and dropout draws a mask for each row, from seeds folded from the step's key.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ...mesh.errors import UserError
from .adapted import Adapted, Rows
from .mode import as_arguments
from .row_dropout import drop

SEEDS = "seed_generator_state"


def adapt_keras(module: Any, inputs: Any) -> Adapted:
    """Adapts a Keras layer or model.

    Args:
        module: A `keras.Layer` or `keras.Model`; it is built for `inputs` where it was not.
        inputs: What it is called with for one row.

    Raises:
        UserError: Keras runs on another backend than JAX.
    """
    import keras

    if keras.backend.backend() != "jax":
        raise UserError(
            f"Keras runs on {keras.backend.backend()} here, and only modules of its JAX backend can be trained. Set "
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
        return _nested(trained), _nested(kept)

    def call(params: Any, state: Any, inputs: Any, rows: Rows) -> tuple[Any, Any]:
        key = jax.random.key(0) if rows.key is None else rows.key

        def value(number: int, path: str) -> Array:
            if path in kept:
                return _at(state, path)
            bits = jax.random.bits(jax.random.fold_in(key, number), (1,), "uint32")
            return jnp.concatenate([bits, jnp.zeros(1, "uint32")])

        given = [_at(params, path) for path in trained], [value(*each) for each in enumerate(others)]
        with _on_mesh(keras, module, rows):
            outputs, after = module.stateless_call(*given, *_arguments(module, inputs), training=rows.training)
        changed = {path: new for path, new in zip(others, after, strict=True) if path in kept}
        return outputs, _nested(changed) if rows.training else state

    return Adapted(init=init, call=call, keeps_state=bool(kept), name=module.name)


def _arguments(module: Any, inputs: Any) -> tuple[Any, ...]:
    """The arguments of a module; a functional model takes its inputs together, as one."""
    together = isinstance(inputs, tuple) and len(inputs) == len(getattr(module, "inputs", None) or ())
    return (list(inputs),) if together else as_arguments(inputs)


@contextmanager
def _on_mesh(keras: Any, module: Any, rows: Rows) -> Iterator[None]:
    """Inside, layers that see several rows at once do what they do for the whole batch."""
    layers = [*module._flatten_layers()] if rows.training else []
    changed = []
    for layer in layers:
        if isinstance(layer, keras.layers.BatchNormalization) and rows.axes:
            layer._moments = _moments_of(layer, rows.axes)
            changed.append((layer, "_moments"))
        elif type(layer) is keras.layers.Dropout and layer.rate > 0:
            layer.call = _dropout_of(layer, rows.example)
            changed.append((layer, "call"))
    try:
        yield
    finally:
        for layer, name in changed:
            del layer.__dict__[name]


def _moments_of(layer: Any, axes: tuple[str, ...]) -> Any:
    def moments(inputs: Any, mask: Any) -> tuple[Array, Array]:
        if mask is not None:
            raise UserError(
                f"Layer {layer.name}: batch norm with a mask is not summed over devices. Leave the mask out."
            )
        mean = lax.pmean(jnp.mean(inputs, layer._reduction_axes, keepdims=True), axes)
        variance = lax.pmean(jnp.mean((inputs - mean) ** 2, layer._reduction_axes), axes)
        return jnp.squeeze(mean, tuple(layer._reduction_axes)), variance

    return moments


def _dropout_of(layer: Any, example: Array) -> Any:
    def call(inputs: Any, training: bool = False) -> Any:
        if not training:
            return inputs
        key = jax.random.wrap_key_data(layer.seed_generator.next().astype("uint32"))
        shape = layer.noise_shape or (None,) * inputs.ndim
        return drop(inputs, layer.rate, key, example, [dim for dim, size in enumerate(shape) if size == 1])

    return call


def _nested(leaves: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *outer, last = path.split("/")
        inner = tree
        for part in outer:
            inner = inner.setdefault(part, {})
        inner[last] = jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf
    return tree


def _at(tree: Any, path: str) -> Any:
    for part in path.split("/"):
        tree = tree[part]
    return tree
