"""What a callback sees of a run under way, and how it asks for something."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...mesh.errors import UserError
from ...mesh.processes import is_main_process
from ...parallel.step.state import TrainState
from .asks import Asks


@dataclass(kw_only=True)
class Run:
    """A run, as its callbacks see it; the same in every process but for what clocks say.

    Attributes:
        folder: where it keeps its files; shared by all processes, of which `is_main` alone should write there.
        start: steps done when this process began.
        num_steps: optimizer steps of the whole run.
        batch: rows of a global batch.
        examples: rows of an epoch; 0 where that is not known, and then there are no epochs.
        left_out: numbers of the batches that no step gets, see `train.not_finite`.
        config: every key of the config, as plain values; empty for a run from Python.
        evaluates: whether there is something to evaluate on.
        metrics: gives the names of an evaluation's metrics; None if only an evaluation itself can tell.
        say: prints a line, in process 0.
        generate: continues a prompt with the parameters at hand: (prompt, length, temperature) -> text. None where the
            model writes no text. All processes call it together, in a pause.
        step: the step under way; in a pause the step that is done.
        state: the state after that step, in a pause; None elsewhere. The next step consumes it: keep nothing of it.
        learning_rate_factor: what updates are multiplied by.
        can_scale: whether the optimizer's state holds that factor.
        parts: what updates of a part of the parameters are multiplied by, by its name (see `in_parts`).
        on_ask: gets what is asked for, in process 0.
    """

    folder: Path
    start: int
    num_steps: int
    batch: int = 0
    examples: int = 0
    left_out: tuple[int, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    evaluates: bool = True
    metrics: Callable[[], Sequence[str] | None] = lambda: None
    say: Callable[[str], None] = print
    generate: Callable[[str, int, float], str] | None = None
    step: int = 0
    state: TrainState | None = None
    learning_rate_factor: float = 1.0
    can_scale: bool = False
    parts: dict[str, float] = field(default_factory=dict)
    on_ask: Callable[[Asks], None] = lambda asks: None
    _kept: dict[int, frozenset[int]] = field(default_factory=dict)

    @property
    def is_main(self) -> bool:
        """Whether this is process 0, which writes for all and whose requests count."""
        return is_main_process()

    def stop(self, reason: str) -> None:
        """Asks to end the run for good: it is evaluated, saved and reported as after its last step; exit code 0.

        Args:
            reason: For people, such as "early stopping: eval_loss has not fallen in 3 evaluations".
        """
        self._ask(Asks(end="finished", reason=reason))

    def interrupt(self, reason: str, *, try_again: bool = False) -> None:
        """Asks to save and end; the same command goes on from there.

        Args:
            reason: For people, such as "the time limit".
            try_again: End with exit code 75, on which supervisors and schedulers start the run again, not with 0.
        """
        self._ask(Asks(end="try_again" if try_again else "interrupted", reason=reason))

    def evaluate(self) -> None:
        """Asks for an evaluation.

        Raises:
            UserError: There is nothing to evaluate on.
        """
        if not self.evaluates:
            raise UserError("A callback asks to evaluate, but there is no evaluation split. Raise data.eval_fraction.")
        self._ask(Asks(evaluate=True))

    def save(self) -> None:
        """Asks for a checkpoint."""
        self._ask(Asks(save=True))

    def scale_learning_rate(self, by: float) -> None:
        """Asks to multiply the learning rate of the steps to come; the factor is saved with the state.

        Args:
            by: Over 0, and finite.

        Raises:
            UserError: `by` is not, or no callback of this run says that it changes the learning rate.
        """
        if not (isinstance(by, int | float) and 0 < by < math.inf):
            raise UserError(f"scale_learning_rate(by={by!r}): the factor has to be a number over 0, and finite.")
        if not self.can_scale:
            raise UserError(
                "A callback changes the learning rate, but the step was built without a factor to change. Set "
                "`changes_learning_rate = True` in the class of the callback; from Python, give build_step the "
                "optimizer `adjustable(optimizer)` of spmdkit.training.callbacks.rate_factor."
            )
        self._ask(Asks(factor=float(by)))

    def train_part(self, name: str, factor: float = 1.0) -> None:
        """Asks to train a part of the parameters from the next step on; the factor is saved with the state.

        Args:
            name: Of a part, as the optimizer was given them (`in_parts`).
            factor: What its updates are multiplied by, at least 0 and finite; 0 stops training it.

        Raises:
            UserError: The factor is not, or the optimizer has no such part.
        """
        if name not in self.parts:
            known = ", ".join(self.parts) or "no parts"
            raise UserError(
                f"train_part({name!r}): the optimizer has {known}. Make it in_parts(optimizer, {{{name!r}: regular "
                "expression of paths}) of spmdkit.training.callbacks.rate_factor."
            )
        if not (isinstance(factor, int | float) and 0 <= factor < math.inf):
            raise UserError(f"train_part({name!r}, {factor!r}): the factor has to be a number from 0, and finite.")
        self._ask(Asks(parts={name: float(factor)}))

    def keep(self, owner: object, steps: Iterable[int]) -> None:
        """Keeps the checkpoints of some steps, beside the newest ones and those that others keep.

        Args:
            owner: The callback; what it kept before is let go.
            steps: Which; those that are not saved do not matter.
        """
        self._kept[id(owner)] = frozenset(steps)

    @property
    def kept(self) -> frozenset[int]:
        """Steps whose checkpoints are kept beside the newest."""
        return frozenset().union(*self._kept.values())

    def _ask(self, asks: Asks) -> None:
        if self.is_main:
            self.on_ask(asks)
