"""AdamW and clipping by the global norm, in NumPy."""

import jax
import numpy as np


def clip(gradients, largest):
    """Gradients scaled down to a global norm of `largest`, where theirs is higher; and their norm."""
    norm = np.sqrt(sum((np.asarray(leaf) ** 2).sum() for leaf in jax.tree.leaves(gradients)))
    return jax.tree.map(lambda leaf: np.asarray(leaf) * min(1.0, largest / norm), gradients), norm


class AdamW:
    """Loshchilov & Hutter 2019: every element alone, decay on every parameter."""

    def __init__(self, params, rate, decay=0.0, first=0.9, second=0.999, epsilon=1e-8):
        self.rate, self.decay, self.first, self.second, self.epsilon = rate, decay, first, second, epsilon
        self.mean, self.square = (jax.tree.map(np.zeros_like, params) for _ in range(2))
        self.steps = 0

    def update(self, params, gradients):
        """The parameters after one more step."""
        self.steps += 1
        mix = lambda rate, old, new: rate * old + (1 - rate) * new  # noqa: E731
        self.mean = jax.tree.map(lambda m, g: mix(self.first, m, g), self.mean, gradients)
        self.square = jax.tree.map(lambda v, g: mix(self.second, v, g * g), self.square, gradients)

        def moved(param, mean, square):
            mean, square = mean / (1 - self.first**self.steps), square / (1 - self.second**self.steps)
            return param - self.rate * (mean / (np.sqrt(square) + self.epsilon) + self.decay * param)

        return jax.tree.map(moved, params, self.mean, self.square)
