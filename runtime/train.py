"""Runs a config: build, check, compile, restore, train, evaluate, sample and report.

This file and `training_run.py` show the whole run. All checks come first: nothing is written until the step is compiled
and a checkpoint and the first batch are read. A command that fails earlier leaves no trace.
"""

from contextlib import ExitStack

from ..checkpoints.identity import RUN
from ..checkpoints.manager import Checkpoints
from ..configs.config_text import as_plain
from ..configs.schema import Config
from ..parallel.step.model_order import abstract_in_model_order
from ..training.display import Display
from ..training.stopping.gate import Gate, stops_on_signals
from .build_run import Built, build
from .compilation import Compilation, open_cache
from .finish import Reporter, explain_missing_sample
from .guards.guards import Guards
from .machine_check import check_memory
from .ownership import Ownership
from .process_check import agree_on_config, check_same_step
from .provenance import describe_run, provenance_of, read_provenance, remarks
from .rollbacks import Rollbacks
from .run_directory import adopt_directory, identify_run, identity_remarks, is_run
from .training_run import TrainingRun
from .warm_start import WarmStart


def train(config: Config, *, fresh: bool = False, reporter: Reporter | None = None) -> int:
    """Trains a config, or continues the run in its directory.

    Call `prepare_devices` first, and join the other processes of the run.

    Args:
        config: The run's configuration.
        fresh: Start from step 0; the run in the directory is moved aside once the new one is ready.
        reporter: Writes the report; None writes none.

    Returns:
        The exit code: 0 if finished, 75 if a signal stopped it, or the exit code of the callback that stopped it.

    Raises:
        UserError: The config or a file that it names is invalid; nothing was lost.
        BadDataError: A value in the data is not allowed.
        DirectoryInUse: Another job owns run.dir.
        DirectoryUnavailable: run.dir is not writable.
        Diverged: The loss is not finite, and `train.not_finite` allows nothing else.
    """
    with ExitStack() as stack:
        agree_on_config(as_plain(config), config.timeouts.rendezvous)
        compilation = Compilation(open_cache(config.run, config.timeouts.rendezvous))
        gate = stack.enter_context(stops_on_signals())
        built = build(config)
        check_memory(built)
        run = _prepare(built, stack, compilation, gate, fresh=fresh, reporter=reporter)
        run.run()
    return run.exit_code


def _prepare(
    built: Built, stack: ExitStack, compilation: Compilation, gate: Gate, *, fresh: bool, reporter: Reporter | None
) -> TrainingRun:
    """Compares a run with its directory and its checkpoints; writes nothing."""
    config, rendezvous = built.config, built.config.timeouts.rendezvous
    provenance = provenance_of(built)
    folder = adopt_directory(config.run.dir, as_plain(config), provenance, rendezvous, fresh=fresh)
    before = read_provenance(folder) if not fresh and is_run(folder) else None
    identity = identify_run(folder, rendezvous, fresh=fresh)
    abstract = built.step.abstract_state()
    checkpoints = Checkpoints(
        folder / "checkpoints",
        keep=config.checkpoint.keep,
        abstract_state=abstract,
        about={**describe_run(built), RUN: identity.run},
        save_seconds=config.timeouts.writing,
    )
    stack.enter_context(checkpoints)
    start = 0 if fresh else checkpoints.latest() or 0
    check_same_step(start, rendezvous)
    if start:
        checkpoints.check_fits()
    warm_start, checkpoint = None, config.checkpoint
    if checkpoint.start_from and not start:
        params = abstract_in_model_order(abstract).params
        warm_start = WarmStart(checkpoint, built.model, params, seed=config.run.seed, seconds=rendezvous)
    display = stack.enter_context(Display(config.train.steps, start, title(built)))
    rollbacks = Rollbacks(config.train.max_rollbacks, config.train.global_batch, folder, rendezvous, fresh=fresh)
    notes = remarks(before, provenance, config.data.source, goes_on=start > 0)
    if start:
        notes += identity_remarks(folder, identity, start)
    for line in filter(None, [*notes, explain_missing_sample(built), *rollbacks.lines()]):
        display.message(line)
    return TrainingRun(
        built=built,
        folder=folder,
        identity=identity,
        checkpoints=checkpoints,
        display=display,
        ownership=stack.enter_context(Ownership(folder, display.message, run=identity.run)),
        gate=gate,
        guards=Guards(config.guards, config.timeouts, display.message),
        rollbacks=rollbacks,
        provenance=provenance,
        latest=start,
        fresh=fresh,
        warm_start=warm_start,
        compilation=compilation,
        reporter=reporter,
    )


def title(built: Built) -> str:
    """Returns the model, the data and the mesh as one line."""
    parameters = f"{built.layouts.num_parameters:,} parameters"
    return f"{built.model.name}, {parameters}, {built.splits.description}; {built.layouts.mesh.summary}"
