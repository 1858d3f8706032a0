"""Settings of other libraries for one test."""

import sys

import pytest
from support.forms_of_names import keras_in


@pytest.fixture(autouse=True)
def keras_settings():
    """Keeps Keras's global settings from passing on to the next test."""
    yield
    if keras := sys.modules.get("keras"):
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")


@pytest.fixture
def keras_float64():
    return keras_in("float64")
