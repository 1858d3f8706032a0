"""A run under way: restored or drawn, trained step by step, stopped, gone back, finished.

Everything was built and checked before (`train.py`). Nothing is written before the step has compiled, a checkpoint and
the first batch have been read, and all processes agree.
"""

from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, closing, suppress
from itertools import chain, islice

import numpy as np

from ...configs.not_finite import policy_of
from ...configs.schema import Config
from ...data.batches import further_batches
from ...mesh.errors import UserError
from ...mesh.processes import is_main_process, local_copy
from ...models.catalog import initial_params
from ...parallel.model import Batch, Params
from ...parallel.sharding.stored_order import stored_order
from ...parallel.step.loss_scaling import MOST_IN_A_ROW, is_dynamic
from ...parallel.step.state import TrainState
from ...training.checkpointing.errors import SaveFailed
from ...training.ending.exits import FINISHED, TRY_AGAIN
from ...training.loop import StepLeftOut, run_steps
from ...training.steps.not_finite import Diverged
from ...training.watching.replicas import ReplicasDiffer
from ..compiling.record import Compilation
from .batches import batches_after, check_first_batch, check_position
from .build import search_path
from .directory.provenance import Provenance
from .directory.shared import check_same_step
from .explain import explain_built
from .finish import finish, nothing_is_left, start_report
from .guarding.agreement import agree_on_start
from .guarding.guards import goodput
from .pauses import Pauses, Surroundings
from .warm_start import WarmStart


class UnderWay:
    """A run under way: its steps, from start to end."""

    def __init__(
        self,
        around: Surroundings,
        made_of: Provenance,
        start: int,
        warm: WarmStart | None,
        compilation: Compilation,
    ) -> None:
        """Takes what was built and checked.

        Args:
            around: The run, its folder, and what watches it.
            made_of: Its data and its code, to agree on.
            start: Steps done.
            warm: Where its first parameters come from; None where the config says.
            compilation: What is told of its programs.
        """
        self.around = around
        self.built, self.config = around.built, around.built.config
        self.made_of = made_of
        self.folder, self.checkpoints, self.display = around.folder, around.checkpoints, around.display
        self.gate, self.guards, self.rollbacks = around.gate, around.guards, around.rollbacks
        self.start = start
        self.warm = warm
        self.compilation = compilation
        self.stopped_after: int | None = None
        self.pauses = Pauses(around, start)

    def go(self, take_folder: Callable[[Iterable[int]], list[str]]) -> None:
        """Restores or initialises, trains what is left, and finishes; changes nothing where that is done already.

        Args:
            take_folder: Writes into the folder that it is this run's, and puts damaged checkpoints of these steps
                aside; called when nothing is left to check.
        """
        if nothing_is_left(self.config, self.folder, self.checkpoints, self.start, self.display.message):
            return
        self.guards.times.switch("compile")
        explanation = explain_built(self.built)  # compiles the step, which then starts at once
        self.compile_further()
        self.guards.times.switch("start")
        agree_on_start(self.built, self.made_of)
        self.display.message(str(explanation))
        if self.config.optimizer.ema.evaluate:
            self.display.message("Evaluations are of the averages of the parameters (optimizer.ema.evaluate).")
        state, damaged, ended = self.first_state()
        self.display.message(self.compilation.line())
        with ExitStack() as reading:
            batches = reading.enter_context(self.batches())
            first = list(islice(batches, 1))
            for batch in first:
                check_first_batch(batch, self.start, self.rollbacks.left_out)
            for line in take_folder(damaged):
                self.display.message(line)
            self.compilation.write(self.folder, self.built.xla)
            start_report(self.built, explanation, self.folder)
            if self.start < self.config.train.steps and not ended:
                self.guards.open(self.built, self.folder, self.start)
                with self.guards.watching():
                    state = self.train(state, chain(first, batches), reading)
                spent = goodput(self.folder) if is_main_process() else None
                if spent:
                    self.display.message(str(spent))
        self.compilation.write(self.folder, self.built.xla)
        if self.is_complete:
            finish(self.built, explanation, state, self.folder, self.display)

    def compile_further(self) -> None:
        """Compiles the step for batches of the other lengths, where the data has several: one program a bucket."""
        source, sharding = self.built.splits.train, self.built.layouts.batch_sharding()
        for batch in further_batches(source, self.config.train.global_batch, sharding):
            self.built.step.compile(batch)

    def batches(self) -> closing[Generator[Batch, None, None]]:
        """The batches of the steps that are left."""
        return closing(batches_after(self.start, self.built, self.rollbacks.left_out, self.guards.took))

    def train(self, state: TrainState, batches: Iterable[Batch], reading: ExitStack) -> TrainState:
        """The steps that are left; goes back where one was not finite, as often as `train.not_finite` allows.

        Args:
            state: To start from.
            batches: Of the steps after it.
            reading: Closes them.
        """
        while True:
            try:
                return self.take_steps(state, self.guards.batches(batches, self.start))
            except (ReplicasDiffer, StepLeftOut):  # the last good checkpoint may still be under way
                with suppress(SaveFailed):
                    self.checkpoints.wait()
                raise
            except Diverged as error:
                self.rollbacks.check(error)
                step, found = error.step, error.found
            reading.close()
            state = self.go_back(step, found)  # the spoilt state went with the error that held its frames
            batches = reading.enter_context(self.batches())

    def go_back(self, step: int, found: str) -> TrainState:
        """The state of the newest checkpoint, or the first one, with the batch of a step left out from then on.

        A save under way is of a step before: none begins before its step was found finite.
        """
        self.guards.rests()
        self.checkpoints.wait()
        self.start = self.checkpoints.latest() or 0
        name = f"the step to go back to, {len(self.rollbacks) + 1}"
        check_same_step(self.folder, self.start, self.config.timeouts.rendezvous, name)
        self.rollbacks.add(step, found, self.start)
        self.pauses = Pauses(self.around, self.start)
        state, damaged, _ = self.first_state()
        self.gate.go_back(self.start, f"going back, {len(self.rollbacks)}", self.config.timeouts.rendezvous)
        self.around.ownership.check()
        self.display.message(self.rollbacks.write(self.start))
        if is_main_process():
            self.checkpoints.keep_aside(damaged)
        self.guards.roll_back(self.start)
        return state

    def take_steps(self, state: TrainState, batches: Iterable[Batch]) -> TrainState:
        """Steps until the last one, or until the run is to stop."""
        with ExitStack() as stack:
            stack.enter_context(self.pauses.recorder.open(self.folder, self.start))
            stack.callback(self.pauses.conductor.close)
            self.pauses.conductor.begin(state)
            state = run_steps(
                self.guards.step(self.built.step),
                state,
                batches,
                start=self.start,
                log_every=self.config.run.log_every,
                on_progress=self.pauses.record,
                pause_at=self.pauses.conductor.pauses_at,
                on_pause=self.pauses.pause,
                after_pause=self.pauses.after_pause,
                may_start=self.pauses.conductor.may_start,
                on_stop=self.stop,
                after_step=self.after_step,
                waited=self.guards.waited,
                most_skipped=most_skipped(self.config),
                on_skip=self.tell_skip,
            )
            done = self.config.train.steps if self.stopped_after is None else self.stopped_after
            self.guards.watchdog.note(done, "save")
            self.checkpoints.wait()
            self.pauses.conductor.end(state)
        self.guards.done(done)
        return state

    def first_state(self) -> tuple[TrainState, Iterable[int], str]:
        """The state to start from, the steps of damaged checkpoints that were passed over to find it, and why callbacks
        have ended the run, or ""."""
        if self.start == 0:
            return self.built.step.init(self.config.run.seed, self.first_params()), (), ""
        restored = self.checkpoints.restore_newest(self.config.timeouts.rendezvous, self.display.message)
        self.start = self.pauses.seen.start = restored.step
        self.display.message(f"Resuming {self.folder} at step {self.start} of {self.config.train.steps}.")
        notes = self.checkpoints.notes(self.start)
        check_position(notes, self.start, self.rollbacks.left_out)
        done = int(np.asarray(local_copy(restored.state.step)).flat[0])
        if done != self.start:
            raise UserError(
                f"The checkpoint {self.folder / 'checkpoints' / str(self.start)} contains the state after step {done}, "
                f"not {self.start}. Give its directory the name {done} again, or remove the copy."
            )
        ended = self.pauses.conductor.restore(notes)
        like = self.built.step.abstract_state()
        return stored_order(self.built.layouts).to_stored(restored.state, like), restored.damaged, ended

    def first_params(self) -> Params | None:
        """The parameters of step 0; None where they are drawn."""
        if self.warm is not None:
            self.display.message(str(self.warm))
            return self.warm.params()
        folders = search_path(self.config)
        return initial_params(self.config.model, self.built.model, folders, seed=self.config.run.seed)

    @property
    def after_step(self) -> Callable[[int, TrainState], None] | None:
        """Called with every step just started and the state after it, waiting for nothing; None where nobody looks."""
        looks = [look for look in (self.pauses.recorder.after_step, self.guards.after_step) if look is not None]
        if len(looks) < 2:
            return looks[0] if looks else None

        def all_of_them(number: int, state: TrainState) -> None:
            for look in looks:
                look(number, state)

        return all_of_them

    def stop(self, number: int, state: TrainState) -> None:
        """Saves where a signal or a callback has stopped the run, in every process at the same step."""
        self.stopped_after = number
        self.guards.watchdog.note(number, "save")
        self.checkpoints.wait()
        of = f"after step {number} of {self.config.train.steps}"
        if self.is_complete:
            self.display.message(f"Complete {of}: {self.gate.reason}.")
        elif number == self.start:
            at = f"Stopped by {self.gate.reason} {of}, before any other was trained."
            self.display.message(f"{at} The same command starts again from there.")
        else:
            if self.checkpoints.latest() != number:
                self.pauses.conductor.save(number, state)
                self.guards.watchdog.note(number, "save")
                self.checkpoints.wait()
            self.display.message(f"Stopped by {self.gate.reason} {of}; saved. The same command goes on from there.")

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to train: no step, or a callback has said so after one."""
        return self.stopped_after is None or (
            self.stopped_after > self.start and self.pauses.conductor.ended.end == "finished"
        )

    @property
    def exit_code(self) -> int:
        """How the run has ended."""
        in_order = self.is_complete or self.pauses.conductor.ended.end in ("finished", "interrupted")
        return FINISHED if in_order else TRY_AGAIN

    def tell_skip(self, number: int, found: str) -> None:
        """Says that an update was left out."""
        scaled = is_dynamic(self.config.precision)
        why = "precision.loss_scale, which halves" if scaled else policy_of(self.config).key
        self.display.message(f"Step {number}: {found}; its update was left out ({why}).")


def most_skipped(config: Config) -> int:
    """How many updates in a row a run may leave out."""
    policy = policy_of(config)
    own = policy.most if policy.policy == "skip" else 0
    return max(own, MOST_IN_A_ROW if is_dynamic(config.precision) else 0)
