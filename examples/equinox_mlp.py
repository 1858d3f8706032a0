"""An Equinox classifier: a module for one row, with the state of its batch norm."""

import equinox as eqx
import jax


class MLP(eqx.Module):
    """Images of 64 values, ten classes."""

    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    second: eqx.nn.Linear

    def __init__(self, key, width):
        first, second = jax.random.split(key)
        self.first = eqx.nn.Linear(64, width, key=first)
        self.norm = eqx.nn.BatchNorm(width, axis_name="batch", mode="batch")
        self.second = eqx.nn.Linear(width, 10, key=second)

    def __call__(self, x, state):
        """(64,) -> logits (10,)."""
        x, state = self.norm(self.first(x), state)
        return self.second(jax.nn.relu(x)), state


def make(key, width=64):
    """The module and its first state."""
    return eqx.nn.make_with_state(MLP)(key, width)
