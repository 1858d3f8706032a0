"""A Flax NNX classifier: the module draws its parameters from the run's seed."""

from flax import nnx


class MLP(nnx.Module):
    """Images of 64 values, ten classes."""

    def __init__(self, rngs: nnx.Rngs, width: int = 64):
        self.first = nnx.Linear(64, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.second = nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, x):
        """(rows, 64) -> logits (rows, 10)."""
        return self.second(self.dropout(nnx.relu(self.norm(self.first(x)))))
