"""Calls the callbacks of a run, and does what they ask for, after the same step in every process.

    pauses     an evaluation, a save, the end of an epoch, and wherever a callback has asked for something
    in one     evaluate, let callbacks hear of it, agree on what process 0's have asked for, report, change the state,
               save, and go on or end

What is asked for in a pause is agreed upon there: every process gets process 0's requests, which costs it a message.
What is asked for between two pauses goes through `Gate.ask`, and becomes a pause after the first step that no process
has started. So whatever a callback decides by, a clock or a file, all processes do the same after the same step.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

from ...data.ordering.order import batch_number
from ...mesh.coordination import told_by_first
from ...mesh.errors import UserError
from ...mesh.near_miss import did_you_mean
from ...mesh.user_errors import told_as_users
from ...parallel.step.state import TrainState
from ..ending.stopping import Gate
from ..run_files import check_output
from .asks import Asks
from .callback import EVENTS, Callback, hears
from .rate_factor import factor_of, part_factors_of, with_factor, with_part_factors
from .run import Run

AGREEMENTS = count(1)
"""Numbers what is agreed upon in this process, whichever conductor asks: a run that goes back has another one."""


class Named(NamedTuple):
    """A callback with its name.

    Attributes:
        name: for messages: "callbacks.0 (early_stopping)".
        callback: any object with methods of `Callback`.
    """

    name: str
    callback: Any


class Conductor:
    """The callbacks of one run, and what happens in its pauses. Every process has one, with the same callbacks."""

    def __init__(
        self,
        callbacks: Sequence[Named],
        run: Run,
        gate: Gate,
        *,
        evaluates_at: Callable[[int], bool] = lambda number: False,
        saves_at: Callable[[int], bool] = lambda number: False,
        evaluate: Callable[[int, TrainState], Mapping[str, float]] = lambda number, state: {},
        save: Callable[[int, TrainState, Mapping[str, Any]], None] = lambda number, state, notes: None,
        seconds: float = 300,
        prepare: bool = True,
    ) -> None:
        """Prepares the callbacks.

        Args:
            callbacks: In the order in which they are called.
            run: What they see; `run.evaluates` says whether `evaluate` is there to be called.
            gate: Of the run.
            evaluates_at: After which steps to evaluate, whatever callbacks say.
            saves_at: After which steps to save, whatever callbacks say.
            evaluate: Evaluates; gives metrics by name.
            save: Starts a save of a state, with notes: plain values that come back to `restore`.
            seconds: How long processes wait for each other.
            prepare: Let callbacks look whether they can do their work; without that, they are not to be called.

        Raises:
            UserError: A callback cannot do its work.
        """
        self._callbacks, self._run, self._gate = list(callbacks), run, gate
        self._evaluates_at, self._saves_at, self._evaluate, self._save = evaluates_at, saves_at, evaluate, save
        self._seconds = seconds
        self._pausing = False
        self._asked = Asks()
        self._heard = {name: self._methods(name) for name in EVENTS}
        self._has_epochs = bool(run.examples and (self._heard["on_epoch_begin"] or self._heard["on_epoch_end"]))
        self.ended = Asks()
        run.on_ask = self._on_ask
        if prepare:
            self._prepare()

    def restore(self, notes: Mapping[str, Any]) -> str:
        """Lets callbacks go on from a checkpoint.

        Args:
            notes: As they were saved with it; of a callback that was not there then, there are none.

        Returns:
            Why the run is complete; "" where it goes on.
        """
        states = list(notes.get("callbacks", ()))
        for name, callback in self._callbacks:
            mine = next((each for each in states if each[0] == _kind(name)), None)
            if mine is None:
                continue
            states.remove(mine)
            if hears(callback, "restore"):
                with told_as_users(f"{name}, restore", callback.restore):
                    callback.restore(mine[1])
        ends = [callback.finished() for _, callback in self._callbacks if hears(callback, "finished")]
        return next(filter(None, ends), "")

    def begin(self, state: TrainState) -> TrainState:
        """Tells that training begins; gives the state to begin with."""
        run = self._run
        run.learning_rate_factor, run.parts = factor_of(state) or 1.0, part_factors_of(state)
        self._enter(run.start, state)
        self._call("on_train_begin")
        if self._has_epochs:
            self._call("on_epoch_begin", self._epoch(run.start))
        self._agree()
        asked, self._asked = self._asked, Asks()
        if asked.end:
            self._end(run.start, asked)
        elif asked:
            self._gate.pause_after(run.start + 1, asked.text())
        self._leave()
        return state

    def may_start(self, number: int) -> bool:
        """Tells whether a step may start, and callbacks that it does."""
        if not self._gate.passes(number):
            return False
        self._run.step = number
        for name, method in self._heard["on_step_begin"]:
            with told_as_users(name, method):
                method(self._run)
        return True

    def logged(self, record: Mapping[str, Any]) -> None:
        """Tells of a logged step."""
        self._call("on_step_end", record)

    def pauses_at(self, number: int) -> bool:
        """Whether to pause after a step that has just been started."""
        return bool(
            self._evaluates_at(number)
            or self._saves_at(number)
            or self._gate.asked_at(number)
            or (self._has_epochs and self._ends_epoch(number))
        )

    def pause(self, number: int, state: TrainState) -> dict[str, float]:
        """The first half of a pause: evaluates, and agrees on what is asked for.

        Args:
            number: Of the step that is done.
            state: The state after it.

        Returns:
            The metrics of an evaluation.
        """
        self._enter(number, state)
        self._asked = Asks.read(self._gate.asked_at(number))
        found: dict[str, float] = {}
        if self._evaluates_at(number) or self._asked.evaluate:
            found = self._evaluation(number, state)
        if self._has_epochs and self._ends_epoch(number):
            self._call("on_epoch_end", self._epoch(number) - 1)
        self._agree()
        if not found and self._run.evaluates and (self._asked.evaluate or self._asked.end == "finished"):
            found = self._evaluation(number, state)
            self._agree()
        return found

    def after_pause(self, number: int, state: TrainState) -> TrainState:
        """The second half, after the step was reported: changes the state, saves, and ends the run where that is asked.

        Args:
            number: Of the step that is done.
            state: The state after it.

        Returns:
            The state to go on with.
        """
        asked, self._asked = self._asked, Asks()
        if asked.factor != 1.0:
            self._run.learning_rate_factor *= asked.factor
            self._run.state = state = with_factor(state, self._run.learning_rate_factor)
        if asked.parts:
            self._run.parts.update(asked.parts)
            self._run.state = state = with_part_factors(state, self._run.parts)
        if self._saves_at(number) or asked.save or asked.end:
            self.save(number, state)
        if asked.end:
            self._end(number, asked)
        elif self._has_epochs and self._ends_epoch(number) and number < self._run.num_steps:
            self._call("on_epoch_begin", self._epoch(number))
        self._leave()
        return state

    def save(self, number: int, state: TrainState) -> None:
        """Saves, with what callbacks have to know to go on from here.

        Args:
            number: Of the step that is done.
            state: The state after it, found finite.
        """
        self._enter(number, state)
        self._call("on_save_begin")
        having = [named for named in self._callbacks if hears(named.callback, "state")]
        notes = {"callbacks": [[_kind(name), _state_of(name, callback)] for name, callback in having]}
        self._save(number, state, notes if having else {})
        self._call("on_save_end")

    def end(self, state: TrainState) -> None:
        """Tells that training has ended in order."""
        self._run.state, self._pausing = state, True
        self._call("on_train_end")
        self._run.state = None

    def close(self) -> None:
        """Closes every callback, whatever happened; the first error of one is raised when all are closed."""
        failure: Exception | None = None
        for name, callback in reversed(self._callbacks):
            try:
                if hears(callback, "close"):
                    with told_as_users(f"{name}, close", callback.close):
                        callback.close()
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _prepare(self) -> None:
        for name, callback in self._callbacks:
            self._check_monitored(name, getattr(callback, "monitors", None))
            if isinstance(callback, Callback) and callback.writes:
                key, own = f"{name.partition(' ')[0]}.path", getattr(type(callback), "path", "")
                path = vars(callback)["path"]
                check_output(self._run.folder, path, callback.writes, key, own, probe=self._run.is_main)
            if hears(callback, "prepare"):
                with told_as_users(f"{name}, prepare", callback.prepare):
                    callback.prepare(self._run)

    def _check_monitored(self, name: str, monitored: str | None) -> None:
        """Checks that evaluations will have the metric that a callback monitors."""
        if monitored is None:
            return
        if not self._run.evaluates:
            raise UserError(
                f"{name} looks at {monitored or 'evaluations'}, but there is nothing to evaluate on. Raise "
                "data.eval_fraction, or leave it out."
            )
        known = self._run.metrics() if monitored else None
        if known is not None and monitored not in known:
            near = did_you_mean(monitored, known)
            raise UserError(
                f"{name}: monitor={monitored!r} is not a metric of an evaluation.{near} The metrics are "
                f"{', '.join(known)}."
            )

    def _methods(self, event: str) -> list[tuple[str, Callable[..., Any]]]:
        having = [named for named in self._callbacks if hears(named.callback, event)]
        return [(f"{name}, {event}", getattr(callback, event)) for name, callback in having]

    def _call(self, event: str, *arguments: Any) -> None:
        for name, method in self._heard[event]:
            with told_as_users(name, method):
                method(self._run, *arguments)

    def _enter(self, number: int, state: TrainState) -> None:
        self._run.step, self._run.state, self._pausing = number, state, True

    def _leave(self) -> None:
        """Ends a pause; what was asked for after all had agreed becomes another."""
        self._run.state, self._pausing = None, False
        late, self._asked = self._asked, Asks()
        if late:
            self._gate.ask(late.text())

    def _on_ask(self, asks: Asks) -> None:
        if self._pausing:
            self._asked |= asks
        else:
            self._gate.ask(asks.text())

    def _agree(self) -> None:
        """What process 0's callbacks ask for is what all ask for."""
        if self._callbacks:
            text = told_by_first(f"callbacks/{next(AGREEMENTS)}", self._asked.text(), seconds=self._seconds)
            self._asked = Asks.read([text])

    def _evaluation(self, number: int, state: TrainState) -> dict[str, float]:
        self._call("on_evaluation_begin")
        found = dict(self._evaluate(number, state))
        self._call("on_evaluation_end", found)
        return found

    def _end(self, number: int, asked: Asks) -> None:
        self.ended = asked
        self._gate.stop_after(number, asked.reason)

    def _epoch(self, number: int) -> int:
        """The epoch that the sample after so many steps is of, from 0."""
        return batch_number(number, self._run.left_out) * self._run.batch // self._run.examples

    def _ends_epoch(self, number: int) -> bool:
        return self._epoch(number) > self._epoch(number - 1)


def _state_of(name: str, callback: Any) -> dict[str, Any]:
    """Returns the state of a callback, which a checkpoint keeps as JSON.

    Raises:
        UserError: It cannot be written as JSON.
    """
    with told_as_users(f"{name}, state", callback.state):
        state = dict(callback.state())
    try:
        json.dumps(state)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{name}: state() must return values that JSON can hold, got {str(state)[:200]}: {error}. Convert arrays "
            "with .tolist() and NumPy numbers with float() or int()."
        ) from error
    return state


def _kind(name: str) -> str:
    """What stays the same where callbacks are put in another order: "early_stopping"."""
    return name.partition("(")[2].rstrip(")") or name
