"""Rows for models of the libraries' documentation: images, tokens, points along a curve."""

import numpy as np
from spmdkit.data import from_arrays

ROWS = 48
RANDOM = np.random.default_rng(0)
LABELS = RANDOM.integers(0, 8, ROWS).astype(np.int32)


def images(config):
    """(8, 8, 1), eight classes."""
    return from_arrays({"inputs": RANDOM.normal(size=(ROWS, 8, 8, 1)).astype(np.float32), "targets": LABELS})


def channels_first(config):
    """(1, 8, 8), eight classes."""
    return from_arrays({"inputs": RANDOM.normal(size=(ROWS, 1, 8, 8)).astype(np.float32), "targets": LABELS})


def tokens(config):
    """12 tokens of 16, one of two classes."""
    inputs = RANDOM.integers(0, 16, (ROWS, 12)).astype(np.int32)
    return from_arrays({"inputs": inputs, "targets": (inputs.sum(1) % 2).astype(np.int32)}, vocabulary=16)


def next_tokens(config):
    """12 tokens of 16, and those that follow."""
    inputs = RANDOM.integers(0, 16, (ROWS, 13)).astype(np.int32)
    return from_arrays({"inputs": inputs[:, :-1], "targets": inputs[:, 1:]}, vocabulary=16)


def spirals(config):
    """6 points of the plane, one of two classes as 0. or 1."""
    inputs = RANDOM.normal(size=(ROWS, 6, 2)).astype(np.float32)
    return from_arrays({"inputs": inputs, "targets": (inputs.sum((1, 2)) > 0).astype(np.float32)[:, None]})
