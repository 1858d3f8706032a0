"""`spmdkit train`: config -> build -> folder -> compile -> restore -> steps -> evaluation, sample and report.

The whole run reads here. All checks come first: nothing is written before the step has compiled and a checkpoint and
the first batch have been read, so a command that fails leaves no trace and the corrected one finds nothing in its way.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from itertools import chain, islice
from pathlib import Path

from ...configs.schema import Config
from ...data.batches import eval_batches, further_batches, train_batches
from ...mesh.errors import UserError
from ...mesh.processes import is_main_process
from ...models.catalog import initial_params
from ...parallel.model import Batch
from ...parallel.sharding.stored_order import stored_order
from ...parallel.step.state import TrainState
from ...training.checkpoints import Checkpoints
from ...training.display import Display, make_display
from ...training.exits import FINISHED, TRY_AGAIN
from ...training.learning_rates import LearningRates, make_learning_rate
from ...training.loop import Progress, measure, run_steps
from ...training.metrics import MetricsLog
from ...training.stopping import Gate, stops_on_signals
from ...training.worker import multi_process
from .agreement import agree_on_config, agree_on_start
from .build import Built, build, data_limits, prepare_devices, search_path
from .explain import explain_built
from .finish import finish, is_reported
from .guards import Guards, goodput
from .memory import check_memory
from .ownership import DirectoryInUse, Ownership
from .provenance import Provenance, provenance, remarks
from .resume import adopt_folder, earlier, write_config
from .saved_with import saved_with
from .shared import check_same_step


def train(config: Config, *, fresh: bool = False) -> int:
    """Trains as a config says, or goes on where its folder left off.

    Args:
        config: The config.
        fresh: Start anew; what the folder holds of a run is moved aside once the new one is ready to start.

    Returns:
        The exit code: 0 of a finished run, 75 of one that a signal has stopped.

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
        gate = stack.enter_context(stops_on_signals())
        built = build(config)
        check_memory(built)
        made_of = provenance(built)
        folder = adopt_folder(config, made_of, fresh=fresh)
        before = None if fresh else earlier(folder)
        saved = stored_order(built.layouts).abstract_model(built.step.abstract_state())
        checkpoints = stack.enter_context(
            Checkpoints(
                folder / "checkpoints", keep=config.checkpoint.keep, abstract_state=saved, about=saved_with(built)
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
        run = _Run(built, made_of, folder, checkpoints, display, start, ownership, gate)

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
    return FINISHED if run.stopped_after is None else TRY_AGAIN


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
        self.stopped_after: int | None = None
        self.guards = Guards(self.config, display.message, self.saves_at)
        self.watchdog = self.guards.watchdog
        self.metrics: MetricsLog | None = None
        self.rates = learning_rates(self.config)
        self.limits = data_limits(self.config, built.splits)

    def go(self, take_folder: Callable[[Iterable[int]], list[str]]) -> None:
        """Restores or initialises, trains what is left, and finishes; changes nothing where that is done already.

        Args:
            take_folder: Writes into the folder that it is this run's, and puts damaged checkpoints of these steps
                aside; called when nothing is left to check.
        """
        steps = self.config.train.steps
        if self.start >= steps and is_reported(self.folder, self.folder / "checkpoints" / str(self.start)):
            self.display.message(
                f"{self.folder} is finished: it holds step {self.start} of {steps}. Raise train.steps to go on, or "
                "start anew with another run.dir or --fresh."
            )
            return
        self.guards.times.switch("compile")
        explanation = explain_built(self.built)  # compiles the step, which then starts at once
        self.compile_further()
        self.guards.times.switch("start")
        agree_on_start(self.built, self.made_of)
        self.display.message(str(explanation))
        state, damaged = self.first_state()
        with closing(self.batches()) as batches:
            first = list(islice(batches, 1))
            for line in take_folder(damaged):
                self.display.message(line)
            if self.start < steps:
                self.guards.open(self.built, self.folder, self.start)
                with self.guards.watching():
                    state = self.train(state, self.guards.batches(chain(first, batches), self.start))
                spent = goodput(self.folder) if is_main_process() else None
                if spent:
                    self.display.message(str(spent))
        if self.stopped_after is not None:
            return
        finish(self.built, explanation, state, self.folder, self.display)

    def compile_further(self) -> None:
        """Compiles the step for batches of the other lengths, where the data has several: one program a bucket."""
        source, sharding = self.built.splits.train, self.built.layouts.batch_sharding()
        for batch in further_batches(source, self.config.train.global_batch, sharding):
            self.built.step.compile(batch)

    def train(self, state: TrainState, batches: Iterable[Batch]) -> TrainState:
        """The steps that are left."""
        with ExitStack() as stack:
            if is_main_process():
                self.metrics = stack.enter_context(MetricsLog(self.folder / "metrics.jsonl", start_step=self.start))
            state = run_steps(
                self.guards.step(self.built.step),
                state,
                batches,
                start=self.start,
                log_every=self.config.run.log_every,
                on_progress=self.record,
                pause_at=lambda number: self.evaluates_at(number) or self.saves_at(number),
                on_pause=self.pause,
                after_pause=self.save,
                may_start=self.gate.passes,
                on_stop=self.stop,
                after_step=self.guards.after_step,
                waited=self.guards.waited,
            )
        done = self.config.train.steps if self.stopped_after is None else self.stopped_after
        self.watchdog.note(done, "save")
        self.checkpoints.wait()
        self.guards.done(done)
        return state

    def first_state(self) -> tuple[TrainState, Iterable[int]]:
        """The state to start from, and the steps of damaged checkpoints that were passed over to find it."""
        if self.start == 0:
            given = initial_params(self.config.model, self.built.model, search_path(self.config))
            return self.built.step.init(self.config.run.seed, given), ()
        restored = self.checkpoints.restore_newest(self.config.timeouts.rendezvous, self.display.message)
        self.start = restored.step
        self.display.message(f"Resuming {self.folder} at step {self.start} of {self.config.train.steps}.")
        like = self.built.step.abstract_state()
        return stored_order(self.built.layouts).to_stored(restored.state, like), restored.damaged

    def batches(self):
        data, train = self.config.data, self.config.train
        return train_batches(
            self.built.splits.train,
            self.built.layouts.batch_sharding(),
            global_batch=train.global_batch,
            seed=self.config.run.seed,
            start_step=self.start,
            num_steps=train.steps - self.start,
            shuffle=data.shuffle,
            prefetch=data.prefetch,
            threads=data.threads,
            limits=self.limits,
        )

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
        if not self.evaluates_at(number):
            return {}
        with self.watchdog.phase(number, "evaluation"):
            return {f"eval_{name}": value for name, value in self.measure(state).items()}

    def save(self, number: int, state: TrainState) -> None:
        """Starts an asynchronous save, where one is due."""
        if self.saves_at(number):
            with self.watchdog.phase(number, "save"):
                self.ownership.check()
                self.checkpoints.save(number, stored_order(self.built.layouts).to_model(state), self.display.message)
        self.guards.done(number)

    def stop(self, number: int, state: TrainState) -> None:
        """Saves where a signal has stopped the run, in every process at the same step."""
        self.stopped_after = number
        self.watchdog.note(number, "save")
        self.checkpoints.wait()
        at = f"Stopped by {self.gate.reason} after step {number} of {self.config.train.steps}"
        if number == self.start:
            self.display.message(f"{at}, before any other was trained. The same command starts again from there.")
            return
        if self.checkpoints.latest() != number:
            self.guards.compare(number, state)
            self.ownership.check()
            self.checkpoints.save(number, stored_order(self.built.layouts).to_model(state))
            self.checkpoints.wait()
        self.display.message(f"{at}; saved. The same command goes on from there.")

    def measure(self, state: TrainState) -> dict[str, float]:
        source = self.built.splits.evaluation
        assert source is not None
        batches = eval_batches(
            source,
            self.built.layouts.batch_sharding(),
            global_batch=self.config.train.global_batch,
            max_batches=self.config.eval.batches or None,
            threads=self.config.data.threads,
            limits=self.limits,
        )
        with closing(batches):
            return measure(self.built.step, state.params, self.watchdog.goes_on(batches), state.model_state)

    def record(self, progress: Progress) -> None:
        """One line of metrics.jsonl and of the display; errors of a save under way surface here."""
        self.checkpoints.check()
        record = {**progress._asdict(), **progress.extra, "learning_rate": self.rates[progress.step - 1]}
        del record["extra"]
        if self.built.model.flops_per_row is not None:
            flops = self.built.model.flops_per_row * self.config.train.global_batch
            record["flops_per_second"] = flops / progress.seconds
        if self.metrics is not None:
            self.metrics.write(record)
        self.display.update(record)


def learning_rates(config: Config) -> LearningRates:
    """The learning rate of every step of the run, by step from 0, so that no step waits for it.

    Raises:
        UserError: The schedule gives a rate that is not a finite number, of float32; names the first such step.
    """
    peak, num_steps = config.optimizer.learning_rate, config.train.steps
    rates = LearningRates(make_learning_rate(peak, config.optimizer.schedule, num_steps), num_steps)
    wrong = rates.first_not_finite()
    if wrong is not None:
        raise UserError(
            f"optimizer.schedule={dict(config.optimizer.schedule)} gives step {wrong + 1} the learning rate "
            f"{rates[wrong]}. Change its options or optimizer.learning_rate={config.optimizer.learning_rate}."
        )
    return rates


def _due(number: int, every: int, last: int) -> bool:
    return number == last or (every > 0 and number % every == 0)
