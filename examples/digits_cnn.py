"""Handwritten digits of scikit-learn, and a convolutional network with batch norm in Flax Linen: digits_cnn.yaml.

The 1,797 images of 8 x 8 pixels come with scikit-learn; nothing is downloaded. Every fifth is held out.
"""

import numpy as np
from flax import linen as nn
from spmdkit.data import DataConfig, Splits, from_arrays


class CNN(nn.Module):
    """Two convolutions with batch norm, and a linear layer over what is left of the image."""

    width: int = 16

    @nn.compact
    def __call__(self, x, train: bool):
        """(rows, 8, 8, 1) -> logits (rows, 10)."""
        for width in (self.width, 2 * self.width):
            x = nn.Conv(width, (3, 3), use_bias=False)(x)
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
            x = nn.max_pool(nn.relu(x), (2, 2), strides=(2, 2))
        return nn.Dense(10, name="head")(x.reshape(x.shape[0], -1))


def digits(config: DataConfig) -> Splits:
    """`data.source: digits_cnn:digits`."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    rows = {"inputs": (pixels / 16).reshape(-1, 8, 8, 1).astype(np.float32), "targets": labels.astype(np.int32)}
    held_out = np.arange(len(labels)) % 5 == 0
    return from_arrays(*({name: array[kept] for name, array in rows.items()} for kept in (~held_out, held_out)))
