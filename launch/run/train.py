"""`spmdkit train`: config -> build -> folder -> compile -> restore -> steps -> evaluation, sample and report.

The whole run reads here. All checks come first: nothing is written before the step has compiled and a checkpoint and
the first batch have been read, so a command that fails leaves no trace and the corrected one finds nothing in its way.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, closing
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from ...configs.schema import Config
from ...data.batches import eval_batches, further_batches
from ...mesh.processes import is_main_process
from ...models.catalog import initial_params
from ...parallel.loss_scaling import MOST_IN_A_ROW, is_dynamic
from ...parallel.model import Batch
from ...parallel.sharding.stored_order import stored_order
from ...parallel.step.state import TrainState
from ...training.callbacks.conductor import Conductor
from ...training.checkpointing.checkpoints import Checkpoints
from ...training.display import Display, make_display
from ...training.ending.exits import FINISHED, TRY_AGAIN
from ...training.ending.stopping import Gate, stops_on_signals
from ...training.loop import Progress, measure, run_steps
from ...training.worker import multi_process
from ..compiling.record import Compilation
from .build import Built, batches_after, build, data_limits, keep_compiled, prepare_devices, search_path
from .callbacks import callbacks_of, seen_by_callbacks
from .directory.ownership import DirectoryInUse, Ownership
from .directory.provenance import Provenance, provenance, remarks
from .directory.resume import adopt_folder, earlier, write_config
from .directory.saved_with import saved_with
from .directory.shared import check_same_step
from .explain import explain_built
from .finish import finish, nothing_is_left
from .guarding.agreement import agree_on_config, agree_on_start
from .guarding.guards import Guards, goodput
from .guarding.memory import check_memory
from .recorder import Recorder
from .sample import sample_text, writes_text


def train(config: Config, *, fresh: bool = False) -> int:
    """Trains as a config says, or goes on where its folder left off.

    Args:
        config: The config.
        fresh: Start anew; what the folder holds of a run is moved aside once the new one is ready to start.

    Returns:
        The exit code: 0 of a finished run, 75 of one that a signal has stopped, and of one that a callback has stopped
        the one that it asks for.

    Raises:
        UserError: A mistake in the config or in the files it names; nothing was lost.
        BadDataError: A value in the data is not allowed.
        DirectoryInUse: Another job owns run.dir.
        FolderUnavailable: The file system of run.dir cannot be written to.
        Diverged: The loss is no longer finite.
    """
    prepare_devices(config)
    with multi_process(config.timeouts, config.run.dir), ExitStack() as stack:
        agree_on_config(config)
        compilation = Compilation(keep_compiled(config))
        gate = stack.enter_context(stops_on_signals())
        built = build(config)
        check_memory(built)
        made_of = provenance(built)
        folder = adopt_folder(config, made_of, fresh=fresh)
        before = None if fresh else earlier(folder)
        saved = stored_order(built.layouts).abstract_model(built.step.abstract_state())
        checkpoints = stack.enter_context(
            Checkpoints(
                folder / "checkpoints",
                keep=config.checkpoint.keep,
                abstract_state=saved,
                about=saved_with(built),
                save_seconds=config.timeouts.writing,
            )
        )
        start = 0 if fresh else checkpoints.latest() or 0
        check_same_step(folder, start, config.timeouts.rendezvous)
        if start:
            checkpoints.check_fits()  # before anything compiles
        display = stack.enter_context(make_display(config.train.steps, start, title(built)))
        for line in remarks(before, made_of, config.data.source, goes_on=start > 0):
            display.message(line)
        ownership = stack.enter_context(Ownership(folder, display.message))
        run = _Run(built, made_of, folder, checkpoints, display, start, ownership, gate, compilation)

        def unchanged() -> None:
            found = 0 if fresh else checkpoints.latest() or 0
            if found != start:
                raise DirectoryInUse(
                    f"run.dir {folder} held step {start} when this command began, and holds step {found} now: another "
                    "job has trained there meanwhile. Start the command again to go on from there."
                )

        def take_folder(damaged: Iterable[int]) -> list[str]:
            def taken() -> list[str]:
                unchanged()
                return [f"Kept as {path}." for path in checkpoints.keep_aside(damaged)]

            return write_config(config, folder, made_of, fresh=fresh, ownership=ownership, taken=taken)

        run.go(take_folder)
    return run.exit_code


def title(built: Built) -> str:
    """One line: which model, on which data, on which mesh."""
    mesh = built.layouts.mesh
    axes = " x ".join(f"{name} {mesh.axis_size(name)}" for name in mesh.axis_names if mesh.axis_size(name) > 1)
    parameters = built.layouts.num_parameters
    return f"{built.model.name}, {parameters:,} parameters, {built.splits.description}; mesh {axes or '1 device'}"


class _Run:
    """A run under way: what happens at each logged step and in each pause."""

    def __init__(
        self,
        built: Built,
        made_of: Provenance,
        folder: Path,
        checkpoints: Checkpoints,
        display: Display,
        start: int,
        ownership: Ownership,
        gate: Gate,
        compilation: Compilation,
    ) -> None:
        self.built = built
        self.made_of = made_of
        self.config = built.config
        self.folder = folder
        self.checkpoints = checkpoints
        self.display = display
        self.start = start
        self.ownership = ownership
        self.gate = gate
        self.compilation = compilation
        self.stopped_after: int | None = None
        self.guards = Guards(self.config, display.message, self.saves_at)
        self.watchdog = self.guards.watchdog
        self.limits = data_limits(self.config, built.splits)
        generate = partial(sample_text, built) if writes_text(built) else None
        self.seen = seen_by_callbacks(
            self.config,
            folder,
            start=start,
            examples=len(built.splits.train),
            evaluates=built.splits.evaluation is not None,
            say=display.message,
            generate=generate,
        )
        self.conductor = Conductor(
            callbacks_of(self.config),
            self.seen,
            gate,
            evaluates_at=self.evaluates_at,
            saves_at=self.saves_at,
            evaluate=self.evaluate,
            save=self.save,
            seconds=self.config.timeouts.rendezvous,
        )
        self.recorder = Recorder(built, display, self.seen, self.conductor)

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
        state, damaged, ended = self.first_state()
        self.display.message(self.compilation.line())
        with closing(batches_after(self.start, self.built)) as batches:
            first = list(islice(batches, 1))
            for line in take_folder(damaged):
                self.display.message(line)
            self.compilation.write(self.folder, self.built.xla)
            if self.start < self.config.train.steps and not ended:
                self.guards.open(self.built, self.folder, self.start)
                with self.guards.watching():
                    state = self.train(state, self.guards.batches(chain(first, batches), self.start))
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

    def train(self, state: TrainState, batches: Iterable[Batch]) -> TrainState:
        """The steps that are left."""
        with ExitStack() as stack:
            stack.enter_context(self.recorder.open(self.folder, self.start))
            stack.callback(self.conductor.close)
            self.conductor.begin(state)
            state = run_steps(
                self.guards.step(self.built.step),
                state,
                batches,
                start=self.start,
                log_every=self.config.run.log_every,
                on_progress=self.record,
                pause_at=self.conductor.pauses_at,
                on_pause=self.pause,
                after_pause=self.after_pause,
                may_start=self.conductor.may_start,
                on_stop=self.stop,
                after_step=self.after_step,
                waited=self.guards.waited,
                most_skipped=most_skipped(self.config),
                on_skip=self.tell_skip,
            )
            done = self.config.train.steps if self.stopped_after is None else self.stopped_after
            self.watchdog.note(done, "save")
            self.checkpoints.wait()
            self.conductor.end(state)
        self.guards.done(done)
        return state

    def first_state(self) -> tuple[TrainState, Iterable[int], str]:
        """The state to start from, the steps of damaged checkpoints that were passed over to find it, and why callbacks
        have ended the run, or ""."""
        if self.start == 0:
            seed, folders = self.config.run.seed, search_path(self.config)
            given = initial_params(self.config.model, self.built.model, folders, seed=seed)
            return self.built.step.init(seed, given), (), ""
        restored = self.checkpoints.restore_newest(self.config.timeouts.rendezvous, self.display.message)
        self.start = self.seen.start = restored.step
        self.display.message(f"Resuming {self.folder} at step {self.start} of {self.config.train.steps}.")
        ended = self.conductor.restore(self.checkpoints.notes(self.start))
        like = self.built.step.abstract_state()
        return stored_order(self.built.layouts).to_stored(restored.state, like), restored.damaged, ended

    def evaluates_at(self, number: int) -> bool:
        if self.built.splits.evaluation is None:
            return False
        return _due(number, self.config.eval.every, self.config.train.steps)

    def saves_at(self, number: int) -> bool:
        return _due(number, self.config.checkpoint.every, self.config.train.steps)

    def pause(self, number: int, state: TrainState) -> dict[str, float]:
        """Between two steps: a comparison of copies before a save, and an evaluation, where they are due."""
        if self.saves_at(number):
            self.guards.compare(number, state)
        return self.conductor.pause(number, state)

    def after_pause(self, number: int, state: TrainState) -> TrainState:
        """Saves where that is due; what callbacks have asked for is done."""
        state = self.conductor.after_pause(number, state)
        self.guards.done(number)
        return state

    def save(self, number: int, state: TrainState, notes: Mapping[str, Any]) -> None:
        """Starts an asynchronous save."""
        if not self.saves_at(number):  # where it was known before, `pause` has compared
            self.guards.compare(number, state)
        with self.watchdog.phase(number, "save"):
            self.ownership.check()
            stored = stored_order(self.built.layouts).to_model(state)
            self.checkpoints.save(number, stored, self.display.message, notes=notes, also_keep=self.seen.kept)

    def after_step(self, number: int, state: TrainState) -> None:
        """A step has just been started: nothing here waits for it."""
        self.recorder.after_step(number, state)
        self.guards.after_step(number, state)

    def stop(self, number: int, state: TrainState) -> None:
        """Saves where a signal or a callback has stopped the run, in every process at the same step."""
        self.stopped_after = number
        self.watchdog.note(number, "save")
        self.checkpoints.wait()
        of = f"after step {number} of {self.config.train.steps}"
        if self.is_complete:
            self.display.message(f"Complete {of}: {self.gate.reason}.")
        elif number == self.start:
            at = f"Stopped by {self.gate.reason} {of}, before any other was trained."
            self.display.message(f"{at} The same command starts again from there.")
        else:
            if self.checkpoints.latest() != number:
                self.conductor.save(number, state)
                self.watchdog.note(number, "save")
                self.checkpoints.wait()
            self.display.message(f"Stopped by {self.gate.reason} {of}; saved. The same command goes on from there.")

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to train: no step, or a callback has said so after one."""
        return self.stopped_after is None or (
            self.stopped_after > self.start and self.conductor.ended.end == "finished"
        )

    @property
    def exit_code(self) -> int:
        """How the run has ended."""
        return FINISHED if self.is_complete or self.conductor.ended.end in ("finished", "interrupted") else TRY_AGAIN

    def evaluate(self, number: int, state: TrainState) -> dict[str, float]:
        """The metrics of an evaluation, by name."""
        source = self.built.splits.evaluation
        assert source is not None
        batches = eval_batches(
            source,
            self.built.layouts.batch_sharding(),
            global_batch=self.config.train.global_batch,
            max_batches=self.config.eval.batches or None,
            threads=self.config.data.threads,
            limits=self.limits,
            layout=self.config.data.layout,
        )
        with self.watchdog.phase(number, "evaluation"), closing(batches):
            found = measure(self.built.step, state.params, self.watchdog.goes_on(batches), state.model_state)
        return {f"eval_{name}": value for name, value in found.items()}

    def tell_skip(self, number: int, found: str) -> None:
        """Says that an update was left out."""
        why = "precision.loss_scale, which halves" if is_dynamic(self.config.precision) else "optimizer.skip_not_finite"
        self.display.message(f"Step {number}: {found}; its update was left out ({why}).")

    def record(self, progress: Progress) -> None:
        """Records a logged step; errors of a save under way surface here."""
        self.checkpoints.check()
        self.recorder(progress)


def most_skipped(config: Config) -> int:
    """How many updates in a row a run may leave out."""
    return max(config.optimizer.skip_not_finite, MOST_IN_A_ROW if is_dynamic(config.precision) else 0)


def _due(number: int, every: int, last: int) -> bool:
    return number == last or (every > 0 and number % every == 0)
