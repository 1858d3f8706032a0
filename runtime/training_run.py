"""A run in progress: restored or initialized, trained step by step, stopped, rolled back, finished.

`train.py` has built and checked everything before. Nothing is written until the step is compiled, a checkpoint and the
first batch are read, and all processes agree.
"""

from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice

import numpy as np

from ..checkpoints.damage import DamagedCheckpoint, SaveFailed
from ..checkpoints.replicas import ReplicaCheck, ReplicasDiffer, StartDiffers
from ..data.batches import check_form, further_batches
from ..mesh.exit_codes import FINISHED, TRY_AGAIN
from ..mesh.processes import is_main_process, local_copy
from ..models.catalog import initial_params
from ..parallel.model import Batch, Params
from ..parallel.step.loss_scaling import MAX_CONSECUTIVE_SKIPS, is_dynamic
from ..parallel.step.state import TrainState
from ..training.callbacks.conductor import restore_callbacks
from ..training.callbacks.fit import run_with_callbacks
from ..training.loop import StepLeftOut
from ..training.metrics import read_metrics
from ..training.steps.not_finite import Diverged
from .build_run import configured_callbacks
from .compilation import Compilation
from .explain import Explanation, explain_built
from .finish import Ending, Reporter, baselines, describe_losses, measured_memory, sample_text, writes_text
from .goodput import GOODPUT, read_goodput
from .ownership import DirectoryInUse
from .process_check import (
    NOT_FROM_THE_KEY,
    agree_on_init,
    agree_on_start,
    check_same_step,
    wait_until_all_know,
)
from .provenance import Provenance
from .rollbacks import batches_after, check_first_batch, check_position
from .run_context import RunContext, StepHooks
from .run_directory import claim_directory, write_config
from .warm_start import WarmStart

FILES_DIFFER = (
    "The parameters were read from files (model.folder, checkpoint.start_from), which must be the same on all hosts."
)
OR_A_DEVICE = "If that is not the cause, a device computes wrongly: spmdkit doctor tests each one."


@dataclass(kw_only=True)
class TrainingRun(RunContext):
    """A run in progress, from its first step to its last.

    Attributes:
        provenance: Its data and code, for all processes to agree on.
        start: Steps done in the state that it starts from.
        latest: The step of the latest checkpoint when the run was built; 0 = none.
        fresh: Whether what is in the directory is moved aside.
        warm_start: The source of its first parameters; None if they are initialized.
        compilation: Counts the compiled programs.
        reporter: Writes its report; None writes none.
    """

    provenance: Provenance
    latest: int
    fresh: bool
    warm_start: WarmStart | None
    compilation: Compilation
    reporter: Reporter | None

    def __post_init__(self) -> None:
        """Creates the work around the steps."""
        self.start = self.latest
        self.stopped_after: int | None = None
        self.hooks = StepHooks(self, self.start)

    def run(self) -> None:
        """Restores or initializes, trains the remaining steps, and finishes; a finished run is left unchanged."""
        if self.is_finished():
            return
        self.guards.times.switch("compile")
        explanation = explain_built(self.built)  # compiles the step, which then starts at once
        source, sharding = self.built.splits.train, self.built.layouts.batch_sharding()
        forms = [self.built.batch]
        for other in further_batches(source, self.config.train.global_batch, sharding):
            self.built.step.compile(other)  # one program for each length of bucketed data
            forms.append(other)
        self.guards.times.switch("start")
        agree_on_start(self.built, self.provenance)
        self.display.message(str(explanation))
        if self.config.optimizer.ema.evaluate:
            self.display.message("Evaluations are of the averages of the parameters (optimizer.ema.evaluate).")
        state, corrupt, ended = self.first_state()
        self.display.message(self.compilation.line())
        with ExitStack() as reading:
            batches = reading.enter_context(self.batches())
            first = list(islice(batches, 1))
            for batch in first:
                check_form(batch, forms)
                check_first_batch(batch, self.start, self.rollbacks.left_out)
            self.claim_directory(corrupt)
            self.compilation.write(self.folder, self.built.xla)
            if self.reporter is not None and is_main_process():
                self.reporter.start(self.built, explanation, self.folder)
            if self.start < self.config.train.steps and not ended:
                self.guards.open(self.replicas, self.folder, self.start)
                with self.guards.watching():
                    state = self.train(state, chain(first, batches), reading)
                if goodput := read_goodput(self.folder / GOODPUT):
                    self.display.message(str(goodput))
        self.compilation.write(self.folder, self.built.xla)
        if self.is_complete:
            self.finish(explanation, state)

    def is_finished(self) -> bool:
        """Returns True, and prints so, if the run is trained and reported."""
        start, steps, why = self.start, self.config.train.steps, ""
        if start and self.config.callbacks:
            with suppress(DamagedCheckpoint):  # the run goes back to the one before it
                why = restore_callbacks(configured_callbacks(self.config), self.checkpoints.notes(start))
        if (start < steps and not why) or (self.reporter and not self.reporter.is_finished(self.folder, start)):
            return False
        reason, more = (f" ({why})", "Change callbacks") if why and start < steps else ("", "Raise train.steps")
        self.display.message(
            f"{self.folder} is finished: it holds step {start} of {steps}{reason}. {more} to go on, or start anew with "
            "another run.dir or --fresh."
        )
        return True

    def claim_directory(self, corrupt: Iterable[int]) -> None:
        """Takes the directory after the last check, moves the corrupt checkpoints of these steps aside, and writes.

        Raises:
            DirectoryInUse: It belongs to another job, or another one has trained in it meanwhile.
        """
        claim_directory(self.folder, self.ownership, self.config.timeouts.rendezvous)
        if is_main_process():
            found = 0 if self.fresh else self.checkpoints.latest() or 0
            if found != self.latest:
                raise DirectoryInUse(
                    f"run.dir {self.folder} held step {self.latest} when this command began, and holds step {found} "
                    "now: another job has trained there meanwhile. Start the command again to go on from there."
                )
            for path in self.checkpoints.keep_aside(corrupt):
                self.display.message(f"Kept as {path}.")
        for line in write_config(self.config, self.folder, self.provenance, self.identity, fresh=self.fresh):
            self.display.message(line)

    def finish(self, explanation: Explanation, state: TrainState) -> None:
        """Prints the results of the run, generates a sample from a language model, and writes the report."""
        wanted, sample = self.config.sample, None
        if wanted.length and writes_text(self.built):  # all processes generate together
            sample = sample_text(self.built, state.params, wanted.prompt, wanted.length, wanted.temperature)
        if not is_main_process() or self.reporter is None:
            return
        if not read_metrics(self.folder / "metrics.jsonl"):
            self.display.message(
                "The update of every step was left out: there is nothing to report. Raise train.steps to go on."
            )
            return
        step = int(np.asarray(local_copy(state.step)).flat[0])
        ending = Ending(step, dict(baselines(self.built)), measured_memory(), sample or "")
        summary, path = self.reporter.finish(self.built, explanation, self.folder, ending)
        for line in describe_losses(summary):
            self.display.message(line)
        if sample is not None:
            self.display.message(f"A sample of what it writes:\n\n{sample}\n")
        self.display.message(f"Wrote {path}")

    def batches(self) -> closing[Generator[Batch, None, None]]:
        """Returns the batches of the remaining steps."""
        return closing(batches_after(self.start, self.built, self.rollbacks.left_out))

    def train(self, state: TrainState, batches: Iterable[Batch], reading: ExitStack) -> TrainState:
        """Trains the remaining steps; rolls back if a step is not finite, as often as `train.not_finite` allows.

        Args:
            state: The state before the first batch.
            batches: The batches of the remaining steps.
            reading: Closes the batches.
        """
        while True:
            try:
                return self.run_steps(state, self.guards.batches(batches, self.start))
            except (ReplicasDiffer, StepLeftOut):  # the last good checkpoint may not be complete yet
                with suppress(SaveFailed):
                    self.checkpoints.wait()
                raise
            except Diverged as error:
                self.rollbacks.check(error)
                step, found = error.step, error.found
            reading.close()
            state = self.roll_back(step, found)  # the error held the old state in its frames
            batches = reading.enter_context(self.batches())

    def roll_back(self, step: int, found: str) -> TrainState:
        """Returns the state of the latest checkpoint, or the first state, and skips the batch of a step from now on.

        A save in progress is of an earlier step: each save starts after its step was found finite.
        """
        self.guards.suspend()
        self.checkpoints.wait()
        self.start = self.checkpoints.latest() or 0
        number, seconds = len(self.rollbacks) + 1, self.config.timeouts.rendezvous
        check_same_step(self.start, seconds, f"the step to go back to, {number}")
        self.rollbacks.add(step, found, self.start)
        self.hooks = StepHooks(self, self.start)
        state, corrupt, _ = self.first_state()
        self.gate.go_back(self.start, f"going back, {number}", seconds)
        self.ownership.check()
        self.display.message(self.rollbacks.write(self.start))
        if is_main_process():
            self.checkpoints.keep_aside(corrupt)
        self.guards.roll_back(self.start)
        return state

    def run_steps(self, state: TrainState, batches: Iterable[Batch]) -> TrainState:
        """Trains until the last step, or until the run must stop."""
        hooks = self.hooks
        with hooks.recorder.open(self.folder, self.start, run=self.identity.run):
            state = run_with_callbacks(
                hooks.conductor,
                self.guards.step(self.built.step),
                state,
                batches,
                finish_saves=self.finish_saves,
                start=self.start,
                log_every=self.config.run.log_every,
                on_progress=hooks.record,
                after_pause=hooks.after_pause,
                on_stop=self.stop,
                after_step=self.after_step,
                waited=self.guards.waited,
                most_skipped=self.max_skipped,
                on_skip=self.report_skip,
            )
        self.guards.done(self.last_step)
        return state

    @property
    def last_step(self) -> int:
        """The last step of this start: the step at which the run stopped, or else the last one of the config."""
        return self.config.train.steps if self.stopped_after is None else self.stopped_after

    def finish_saves(self) -> None:
        """Waits until the checkpoints are on disk."""
        self.guards.watchdog.note(self.last_step, "save")
        self.checkpoints.wait()

    def first_state(self) -> tuple[TrainState, Iterable[int], str]:
        """Returns the state to start from, the steps of corrupt checkpoints, and why callbacks ended the run, or ""."""
        if self.start == 0:
            return self.create_state(), (), ""
        restored = self.checkpoints.restore_newest(self.config.timeouts.rendezvous, self.display.message)
        self.start = self.hooks.seen.start = restored.step
        self.display.message(f"Resuming {self.folder} at step {self.start} of {self.config.train.steps}.")
        notes = self.checkpoints.notes(self.start)
        if "data" in notes:  # not in those of `fit`
            check_position(notes["data"], self.start, self.rollbacks.left_out)
        ended = self.hooks.conductor.restore(notes)
        return restored.state, restored.damaged, ended

    def create_state(self) -> TrainState:
        """Returns the state of step 0, after all processes have compared its programs and its values.

        Raises:
            Disagreement: The programs differ between processes.
            StartDiffers: Devices hold different values of an array.
        """
        params = self.first_params()
        drawn = params is None
        draws = drawn or (self.warm_start is not None and self.warm_start.initializes)
        agree_on_init(self.built, f"init, {len(self.rollbacks)}", draws=draws)
        state = self.built.step.init(self.config.run.seed, params)
        origin = f"The init of {self.built.model.name} {NOT_FROM_THE_KEY}." if drawn else FILES_DIFFER
        try:
            self.replicas.check_start(state, f"{origin} {OR_A_DEVICE}")
        except StartDiffers:
            wait_until_all_know()
            raise
        return state

    def first_params(self) -> Params | None:
        """Returns the parameters of step 0; None if the step initializes them."""
        if self.warm_start is not None:
            self.display.message(str(self.warm_start))
            return self.warm_start.params()
        run = self.config.run
        return initial_params(self.config.model, self.built.model, run.search_path, seed=run.seed)

    @cached_property
    def replicas(self) -> ReplicaCheck:
        """The comparison of the arrays that several devices hold."""
        return ReplicaCheck(self.built.step.abstract_state())

    @property
    def after_step(self) -> Callable[[int, TrainState], None] | None:
        """The hook for every started step and the state after it, which must not wait; None if nothing needs it."""
        hooks = [hook for hook in (self.hooks.recorder.after_step, self.guards.after_step) if hook is not None]

        def call_all(number: int, state: TrainState) -> None:
            for hook in hooks:
                hook(number, state)

        return call_all if hooks else None

    def stop(self, number: int, state: TrainState) -> None:
        """Saves after a signal or a callback stopped the run, in every process at the same step."""
        self.stopped_after = number
        self.finish_saves()
        position = f"after step {number} of {self.config.train.steps}"
        if self.is_complete:
            self.display.message(f"Complete {position}: {self.gate.reason}.")
        elif number == self.start:
            stopped = f"Stopped by {self.gate.reason} {position}, before any other was trained."
            self.display.message(f"{stopped} The same command starts again from there.")
        else:
            if self.checkpoints.latest() != number:
                self.hooks.conductor.save(number, state)
                self.finish_saves()
            self.display.message(
                f"Stopped by {self.gate.reason} {position}; saved. The same command goes on from there."
            )

    @property
    def is_complete(self) -> bool:
        """True if nothing is left to train: all steps are done, or a callback ended the run."""
        return self.stopped_after is None or (
            self.stopped_after > self.start and self.hooks.conductor.ended.end == "finished"
        )

    @property
    def exit_code(self) -> int:
        """The exit code of the run."""
        in_order = self.is_complete or self.hooks.conductor.ended.end in ("finished", "interrupted")
        return FINISHED if in_order else TRY_AGAIN

    def report_skip(self, number: int, found: str) -> None:
        """Prints that an update was skipped."""
        why = "precision.loss_scale, which halves" if is_dynamic(self.config.precision) else "train.not_finite"
        goes_on = ""
        local_steps = self.built.layouts.local_steps
        if local_steps and number % local_steps == 0:
            goes_on = f" The groups do not meet (strategy.data.local_steps={local_steps}): their round goes on."
        self.display.message(f"Step {number}: {found}; its update was left out ({why}).{goes_on}")

    @property
    def max_skipped(self) -> int:
        """The number of consecutive updates that the run may skip."""
        return max(self.config.train.max_skips, MAX_CONSECUTIVE_SKIPS if is_dynamic(self.config.precision) else 0)
