"""A Keras classifier on the JAX backend."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
from keras import layers


def make(width: int = 64):
    """Images of 64 values, ten classes."""
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            layers.Input((64,)),
            layers.Dense(width, use_bias=False, name="first"),
            layers.BatchNormalization(name="norm"),
            layers.ReLU(),
            layers.Dropout(0.1),
            layers.Dense(10, name="second"),
        ],
        name="mlp",
    )
