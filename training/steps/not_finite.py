"""Steps with a loss, norm or state that is not finite: counts them, and raises an error if there are too many."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ...mesh.exit_codes import DIVERGED
from ...mesh.processes import local_copy
from ...parallel.options import FLOAT32
from ...parallel.step.loss_scaling import MAX_CONSECUTIVE_SKIPS, is_dynamic
from ...parallel.step.state import TrainState

SAVED = "Checkpoints on disk are from before it."
LATER = f" Lower optimizer.learning_rate, set train.clip_norm, or check the data of this step. {SAVED}"
DATA = (
    "Inputs or targets that the model does not accept are likelier, such as a class or a token id beyond its sizes "
    "(JAX reads NaN there without an error); else a log of 0, a division by 0 or an overflow in the loss."
)
AT_FIRST = f" No update was made before it, so the learning rate is not the cause. {DATA}"
"""Advice for a loss that was never finite."""
FINITE_GRADIENTS = f" The gradients are finite, so the parameters are not the cause. {DATA} {SAVED}"
"""Advice for a loss whose NaN no parameter changes."""


class Diverged(RuntimeError):
    """The loss or the norm of the gradients is no longer a finite number.

    Attributes:
        step: The first step where this was detected.
        found: A description of the values.
        advice: The likely cause and the fix, after a space.
    """

    exit_code = DIVERGED

    def __init__(self, step: int, found: str, advice: str) -> None:
        super().__init__(f"Step {step}: {found}.{advice}")
        self.step = step
        self.found = found
        self.advice = advice


def most_left_out(step: Any) -> int:
    """Returns the consecutive updates that the step itself may skip; 0 for a wrapped step."""
    return MAX_CONSECUTIVE_SKIPS if is_dynamic(getattr(step, "precision", FLOAT32)) else 0


class Skips:
    """Counts steps with a loss or norm that is not finite."""

    def __init__(self, most: int, on_skip: Callable[[int, str], None]) -> None:
        """Starts at zero.

        Args:
            most: The maximum number of consecutive steps.
            on_skip: Called with the number of such a step and a description.
        """
        self._most, self._on_skip = most, on_skip
        self._in_a_row = self._total = 0

    @property
    def figures(self) -> dict[str, float]:
        """The number of skipped steps since this start, if there are any."""
        return {"skipped": float(self._total)} if self._total else {}

    def takes(self, number: int, loss: float, grad_norm: float) -> bool:
        """Returns whether a step is not finite, and counts it.

        Raises:
            Diverged: There are too many consecutive ones.
        """
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self._in_a_row = 0
            return False
        self._in_a_row += 1
        self._total += 1
        found = f"the loss is {loss} and the norm of the gradients {grad_norm}"
        if self._in_a_row > self._most:
            allowed = f" It is number {self._in_a_row} in a row, of at most {self._most}." if self._most else ""
            raise Diverged(number, found, f"{allowed}{self._likely_cause(number, loss, grad_norm)}")
        self._on_skip(number, found)
        return True

    def _likely_cause(self, number: int, loss: float, grad_norm: float) -> str:
        """Returns the advice for the last step that was not finite."""
        if self._in_a_row == number:
            return AT_FIRST
        return FINITE_GRADIENTS if math.isnan(loss) and math.isfinite(grad_norm) else LATER


def check_finite(number: int, state: TrainState) -> None:
    """Checks that the state is finite: the loss of a step does not include its own update.

    Args:
        number: The completed step.
        state: The state after it.

    Raises:
        Diverged: A parameter, the model's state or what strategies keep between steps is not finite.
    """
    trees = {"the parameters are": state.params}
    if jax.tree.leaves(state.model_state):
        trees["the model's state is"] = state.model_state
    for name, tree in state.extra._asdict().items() if state.extra else ():
        trees[f"what strategy.data keeps between steps (TrainState.extra.{name}) is"] = tree
    for what, tree in trees.items():
        if not jax.device_get(local_copy(_all_finite(tree))):
            raise Diverged(
                number,
                f"{what} not finite after its update",
                " Lower optimizer.learning_rate. Checkpoints on disk are from before it.",
            )


@jax.jit
def _all_finite(tree: Any) -> jax.Array:
    floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return jnp.array([jnp.isfinite(leaf).all() for leaf in floats]).all()
