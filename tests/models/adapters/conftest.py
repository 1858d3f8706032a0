"""Keeps Keras's global settings from passing on to the next test."""

import sys

import pytest


@pytest.fixture(autouse=True)
def keras_settings():
    yield
    if keras := sys.modules.get("keras"):
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")
