"""Calls the callbacks of a run, and performs their requests after the same step in every process.

    pauses     an evaluation, a save, the end of an epoch, and a request of a callback
    in one     evaluate, call the callbacks, agree on the requests of process 0, report, change the state, save, and
               continue or end

Requests in a pause take effect there: every process receives those of process 0, which costs a message. Requests
between two pauses go through `Gate.ask` and cause a pause after the first step that no process has started. Therefore,
even if a callback decides by a clock or a file, all processes do the same after the same step.
"""

import json
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from itertools import count
from typing import Any

from ...data.ordering.order import batch_number
from ...mesh.errors import UserError, unknown_name
from ...mesh.processes import broadcast_text
from ...parallel.model.user_errors import as_user_error
from ...parallel.step.state import TrainState
from ..run_files import check_output
from ..stopping.gate import Gate
from .callback import EVENTS, Callback, Requests, Run, implements
from .rate_factor import LEARNING_RATE, factors_of, with_factors

AGREEMENTS = count(1)
"""Numbers the agreements of this process, across conductors: a run that rolls back creates another one."""


class Conductor:
    """The callbacks of one run, and its pauses. Every process has one, with the same callbacks."""

    def __init__(
        self,
        callbacks: Mapping[str, Any],
        run: Run,
        gate: Gate,
        *,
        evaluates_at: Callable[[int], bool] = lambda number: False,
        saves_at: Callable[[int], bool] = lambda number: False,
        evaluate: Callable[[int, TrainState], Mapping[str, float]] = lambda number, state: {},
        save: Callable[[int, TrainState, Mapping[str, Any]], None] = lambda number, state, notes: None,
        seconds: float = 300,
    ) -> None:
        """Lets the callbacks check that they can work.

        Args:
            callbacks: Name for messages, such as "callbacks.0 (early_stopping)" -> callback, in order.
            run: Their view of the run; `run.evaluates` is False if `evaluate` must not be called.
            gate: The gate of the run.
            evaluates_at: Returns whether to evaluate after a step, apart from requests.
            saves_at: Returns whether to save after a step, apart from requests.
            evaluate: Evaluates and returns metrics by name.
            save: Starts saving a state with notes: plain values for `restore`.
            seconds: The time that processes wait for each other.

        Raises:
            UserError: A callback cannot work.
        """
        self._callbacks, self._run, self._gate = dict(callbacks), run, gate
        self._evaluates_at, self._saves_at, self._evaluate, self._save = evaluates_at, saves_at, evaluate, save
        self._seconds = seconds
        self._pausing = False
        self._requested = Requests()
        self._handlers = {name: self._methods(name) for name in EVENTS}
        self._has_epochs = bool(run.examples and (self._handlers["on_epoch_begin"] or self._handlers["on_epoch_end"]))
        self.ended = Requests()
        run.on_request = self._on_request
        for name, callback in self._callbacks.items():
            self._prepare(name, callback)
        known = run.metrics() if any(getattr(each, "monitors", None) for each in self._callbacks.values()) else None
        if known is not None:
            self._check_monitored(known)

    @property
    def last_step(self) -> int:
        """The last step of the run, unless something stops it earlier."""
        return self._run.num_steps

    def restore(self, notes: Mapping[str, Any]) -> str:
        """Restores the callbacks from a checkpoint; see `restore_callbacks`."""
        return restore_callbacks(self._callbacks, notes)

    def begin(self, state: TrainState) -> TrainState:
        """Calls `on_train_begin` and returns the first state."""
        run = self._run
        run.parts = factors_of(state)
        run.learning_rate_factor = run.parts.pop(LEARNING_RATE, 1.0)
        self._enter(run.start, state)
        self._call("on_train_begin")
        if self._has_epochs:
            self._call("on_epoch_begin", self._epoch(run.start))
        self._agree()
        asked = self._take_requests()
        if asked.end:
            self._end(run.start, asked)
        elif asked:
            self._gate.pause_after(run.start + 1, asked.text())
        self._leave()
        return state

    def may_start(self, number: int) -> bool:
        """Returns whether a step may start, and calls `on_step_begin` if so."""
        if not self._gate.passes(number):
            return False
        self._run.step = number
        self._call("on_step_begin")
        return True

    def logged(self, record: Mapping[str, Any]) -> None:
        """Calls `on_step_end`."""
        self._call("on_step_end", record)

    def pauses_at(self, number: int) -> bool:
        """Returns whether to pause after a step that has just started."""
        is_due = self._evaluates_at(number) or self._saves_at(number) or self._ends_epoch(number)
        return is_due or bool(self._gate.asked_at(number))

    def pause(self, number: int, state: TrainState) -> dict[str, float]:
        """Runs the first half of a pause: evaluates, and agrees on requests.

        Args:
            number: The completed step.
            state: The state after it.

        Returns:
            The metrics of an evaluation, if there was one.
        """
        self._enter(number, state)
        self._requested = Requests.read(self._gate.asked_at(number))
        found: dict[str, float] = {}
        if self._evaluates_at(number) or self._requested.evaluate:
            found = self._evaluation(number, state)
        if self._ends_epoch(number):
            self._call("on_epoch_end", self._epoch(number) - 1)
        self._agree()
        if not found and self._run.evaluates and (self._requested.evaluate or self._requested.end == "finished"):
            found = self._evaluation(number, state)
            self._agree()
        return found

    def after_pause(self, number: int, state: TrainState) -> TrainState:
        """Runs the second half, after the step was reported: changes the state, saves, and ends the run on request.

        Args:
            number: The completed step.
            state: The state after it.

        Returns:
            The state to continue with.
        """
        run, asked = self._run, self._take_requests()
        if asked.factor != 1.0 or asked.parts:
            run.learning_rate_factor *= asked.factor
            run.parts |= asked.parts
            run.state = state = with_factors(state, {LEARNING_RATE: run.learning_rate_factor, **run.parts})
        if self._saves_at(number) or asked.save or asked.end:
            self.save(number, state)
        if asked.end:
            self._end(number, asked)
        elif self._ends_epoch(number) and number < run.num_steps:
            self._call("on_epoch_begin", self._epoch(number))
        self._leave()
        return state

    def save(self, number: int, state: TrainState) -> None:
        """Saves the state, with the states of the callbacks.

        Args:
            number: The completed step.
            state: The state after it, checked to be finite.
        """
        self._enter(number, state)
        self._call("on_save_begin")
        having = {name: each for name, each in self._callbacks.items() if implements(each, "state")}
        notes = {"callbacks": [[_kind(name), _state_of(name, callback)] for name, callback in having.items()]}
        self._save(number, state, notes if having else {})
        self._call("on_save_end")

    def end(self, state: TrainState) -> None:
        """Calls `on_train_end`."""
        self._run.state, self._pausing = state, True
        self._call("on_train_end")
        self._run.state = None

    def close(self) -> None:
        """Closes every callback, the last one first; raises an error after all are closed."""
        with ExitStack() as closing:
            for name, callback in self._callbacks.items():
                if implements(callback, "close"):
                    closing.callback(self._close, name, callback)

    def _close(self, name: str, callback: Any) -> None:
        with as_user_error(f"{name}, close", callback.close):
            callback.close()

    def _prepare(self, name: str, callback: Any) -> None:
        run, monitored = self._run, getattr(callback, "monitors", None)
        if monitored is not None and not run.evaluates:
            needed = f"{name} needs {monitored or 'evaluations'}"
            raise UserError(f"{needed}, but the evaluation split is missing. Raise data.eval_fraction.")
        if isinstance(callback, Callback) and callback.writes:
            key, own = f"{name.partition(' ')[0]}.path", getattr(type(callback), "path", "")
            path: Any = getattr(callback, "path", "")
            check_output(run.folder, path, callback.writes, key, own, probe=run.is_main)
        if implements(callback, "prepare"):
            with as_user_error(f"{name}, prepare", callback.prepare):
                callback.prepare(run)

    def _check_monitored(self, known: Collection[str]) -> None:
        """Checks that callbacks monitor only metrics with these names."""
        for name, callback in self._callbacks.items():
            monitored = getattr(callback, "monitors", None)
            if monitored and monitored not in known:
                raise UserError(f"{name}: {unknown_name('monitor', monitored, known)}")

    def _methods(self, event: str) -> list[tuple[str, Callable[..., Any]]]:
        having = {name: each for name, each in self._callbacks.items() if implements(each, event)}
        return [(f"{name}, {event}", getattr(callback, event)) for name, callback in having.items()]

    def _call(self, event: str, *arguments: Any) -> None:
        for name, method in self._handlers[event]:
            with as_user_error(name, method):
                method(self._run, *arguments)

    def _enter(self, number: int, state: TrainState) -> None:
        self._run.step, self._run.state, self._pausing = number, state, True

    def _leave(self) -> None:
        """Ends a pause; requests after the agreement cause another pause."""
        self._run.state, self._pausing = None, False
        late = self._take_requests()
        if late:
            self._gate.ask(late.text())

    def _take_requests(self) -> Requests:
        taken, self._requested = self._requested, Requests()
        return taken

    def _on_request(self, requests: Requests) -> None:
        if self._pausing:
            self._requested |= requests
        else:
            self._gate.ask(requests.text())

    def _agree(self) -> None:
        """Replaces the requests of this process by those of process 0."""
        if self._callbacks:
            text = broadcast_text(f"callbacks/{next(AGREEMENTS)}", self._requested.text(), seconds=self._seconds)
            self._requested = Requests.read([text])

    def _evaluation(self, number: int, state: TrainState) -> dict[str, float]:
        self._call("on_evaluation_begin")
        found = dict(self._evaluate(number, state))
        self._check_monitored(found)
        self._call("on_evaluation_end", found)
        return found

    def _end(self, number: int, asked: Requests) -> None:
        self.ended = asked
        self._gate.stop_after(number, asked.reason)

    def _epoch(self, number: int) -> int:
        """Returns the epoch, from 0, of the first sample after a step."""
        return batch_number(number, self._run.left_out) * self._run.batch // self._run.examples

    def _ends_epoch(self, number: int) -> bool:
        return self._has_epochs and self._epoch(number) > self._epoch(number - 1)


def restore_callbacks(callbacks: Mapping[str, Any], notes: Mapping[str, Any]) -> str:
    """Restores callbacks from a checkpoint.

    Args:
        callbacks: Name -> callback, in order.
        notes: The notes in the checkpoint; new callbacks have none.

    Returns:
        The reason that the run is already complete, or "".
    """
    states = list(notes.get("callbacks", ()))
    for name, callback in callbacks.items():
        mine = next((each for each in states if each[0] == _kind(name)), None)
        if mine is None:
            continue
        states.remove(mine)
        if implements(callback, "restore"):
            with as_user_error(f"{name}, restore", callback.restore):
                callback.restore(mine[1])
    ends = [callback.finished() for callback in callbacks.values() if implements(callback, "finished")]
    return next(filter(None, ends), "")


def _state_of(name: str, callback: Any) -> dict[str, Any]:
    """Returns the state of a callback, which a checkpoint keeps as JSON.

    Raises:
        UserError: It cannot be written as JSON.
    """
    with as_user_error(f"{name}, state", callback.state):
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
    """Returns the part of a name that does not depend on the order of callbacks: "early_stopping"."""
    return name.partition("(")[2].rstrip(")") or name
