"""Steps whose loss, norm or state is not finite: how many in a row may be, and the error of one too many."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ...mesh.processes import local_copy
from ...parallel.precision import FLOAT32
from ...parallel.step.loss_scaling import MOST_IN_A_ROW, is_dynamic
from ...parallel.step.state import TrainState
from ..ending.exits import DIVERGED


class Diverged(RuntimeError):
    """The loss or the norm of the gradients is no longer a finite number.

    Attributes:
        step: the first step that was found so.
        found: what was found, in words.
    """

    exit_code = DIVERGED

    def __init__(self, step: int, found: str, advice: str) -> None:
        super().__init__(f"Step {step}: {found}.{advice}")
        self.step, self.found = step, found


def most_left_out(step: Any) -> int:
    """Updates in a row that the step itself may leave out, of which one that is wrapped says nothing: 0."""
    return MOST_IN_A_ROW if is_dynamic(getattr(step, "precision", FLOAT32)) else 0


class Skips:
    """Steps whose loss or norm is not finite: as many in a row as may be, and how many there were."""

    def __init__(self, most: int, on_skip: Callable[[int, str], None]) -> None:
        """Lets so many pass.

        Args:
            most: In a row; 0 lets none pass.
            on_skip: Called with the number of such a step, and what was found.
        """
        self._most, self._on_skip = most, on_skip
        self._in_a_row = self._total = 0

    @property
    def figures(self) -> dict[str, float]:
        """How many there were since this start, where there was one."""
        return {"skipped": float(self._total)} if self._total else {}

    def takes(self, number: int, loss: float, grad_norm: float) -> bool:
        """Tells whether a step is one of them.

        Raises:
            Diverged: It is one too many.
        """
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self._in_a_row = 0
            return False
        self._in_a_row += 1
        self._total += 1
        found = f"the loss is {loss} and the norm of the gradients {grad_norm}"
        if self._in_a_row > self._most:
            allowed = f" It is number {self._in_a_row} in a row, of at most {self._most}." if self._most else ""
            raise Diverged(
                number,
                found,
                f"{allowed} Lower optimizer.learning_rate, set train.clip_norm, or look at the data of this step. "
                "Checkpoints on disk are from before it.",
            )
        self._on_skip(number, found)
        return True


def check_finite(number: int, state: TrainState) -> None:
    """Looks for what is not finite in the state: the loss of a step is from before its update, which shows there alone.

    Args:
        number: Of the step just done.
        state: After it.

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
