"""Everything that `model.name` may lead to: each takes `width`, which has to be given, and `depth`, a whole number."""

import dataclasses
import os

import equinox as eqx
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

FEATURES, CLASSES = 4, 3


class NNXClass(nnx.Module):
    def __init__(self, width, depth: int = 2, *, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(FEATURES, width, rngs=rngs) for _ in range(depth)])

    def __call__(self, x):
        return sum(layer(x) for layer in self.layers)


def nnx_maker(width, rngs, depth: int = 2):
    return NNXClass(width, depth, rngs=rngs)


def nnx_function(width, depth: int = 2):
    return NNXClass(width, depth, rngs=nnx.Rngs(0))


class EquinoxClass(eqx.Module):
    first: eqx.nn.Linear

    def __init__(self, width, depth: int = 2, *, key):
        self.first = eqx.nn.Linear(FEATURES, width, key=key)

    def __call__(self, x):
        return self.first(x)


def equinox_maker(width, key, depth: int = 2):
    return EquinoxClass(width, depth, key=key)


class EquinoxFields(eqx.Module):
    width: int
    depth: int = 2
    scale: float = eqx.field(default=1.0, converter=jnp.asarray)

    def __call__(self, x):
        return self.scale * jnp.resize(x, self.width)


class LinenClass(nn.Module):
    width: int
    depth: int = 2

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.width)(x)


def linen_function(width, depth: int = 2):
    return LinenClass(width, depth)


def init(key):
    return {"w": jnp.zeros(3)}


def loss(params, batch, key):
    return jnp.sum(params["w"]), jnp.ones(())


def own_function(width, depth: int = 2):
    return init, loss


class OwnClass:
    def __init__(self, width, depth: int = 2):
        self.width = width

    def init(self, key):
        return init(key)

    def loss(self, params, batch, key):
        return loss(params, batch, key)


@dataclasses.dataclass
class OwnFields(OwnClass):
    width: int
    depth: int = 2


def keras_in(dtype):
    """Keras, which takes seconds to import, with this dtype for all that it makes."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    import keras

    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)
    return keras


def keras_forms():
    """A class and a function of Keras."""
    keras = keras_in("float32")

    class KerasClass(keras.Model):
        def __init__(self, width, depth: int = 2, **options):
            super().__init__(**options)
            self.dense = keras.layers.Dense(width)

        def call(self, x):
            return self.dense(x)

    def keras_function(width, depth: int = 2):
        return keras.Sequential([keras.layers.Input((FEATURES,)), keras.layers.Dense(width)])

    return KerasClass, keras_function
