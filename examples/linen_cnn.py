"""A Flax Linen classifier as its documentation writes them: batch norm, dropout, and a flag for training."""

from flax import linen as nn


class CNN(nn.Module):
    """Images of 64 values, ten classes."""

    width: int = 16

    @nn.compact
    def __call__(self, x, train: bool):
        """(rows, 64) -> logits (rows, 10)."""
        x = x.reshape(-1, 8, 8, 1)
        x = nn.Conv(self.width, (3, 3))(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        x = nn.relu(x)
        x = nn.avg_pool(x, (2, 2), strides=(2, 2))
        x = x.reshape(x.shape[0], -1)
        x = nn.Dropout(0.1, deterministic=not train)(x)
        return nn.Dense(10)(x)
