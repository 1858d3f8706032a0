"""Settings of other libraries for one test."""

import os
import sys

import pytest


@pytest.fixture(autouse=True)
def keras_settings():
    """Keeps Keras's global settings from passing on to the next test."""
    yield
    if keras := sys.modules.get("keras"):
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")


@pytest.fixture
def keras_float64():
    os.environ.setdefault("KERAS_BACKEND", "jax")
    import keras

    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    return keras
