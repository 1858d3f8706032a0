"""`spmdkit train`: config -> build -> folder -> compile -> restore -> steps -> evaluation, sample and report.

The whole run reads here and, once it is built, in `under_way.py`. All checks come first: nothing is written before the
step has compiled and a checkpoint and the first batch have been read, so a command that fails leaves no trace and the
corrected one finds nothing in its way.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial

from ...configs.schema import Config
from ...parallel.sharding.stored_order import stored_order
from ...training.checkpointing.checkpoints import Checkpoints
from ...training.display import make_display
from ...training.ending.stopping import stops_on_signals
from ...training.worker import multi_process, starts_with_the_others
from ..compiling.record import Compilation
from .build import Built, build, keep_compiled, prepare_devices
from .directory.ownership import DirectoryInUse, Ownership
from .directory.provenance import provenance, remarks
from .directory.resume import adopt_folder, earlier, write_config
from .directory.saved_with import saved_with
from .directory.shared import check_same_step
from .guarding.agreement import agree_on_config
from .guarding.guards import Guards
from .guarding.memory import check_memory
from .pauses import Surroundings, saves_at
from .rolling_back import Rollbacks
from .sample import why_no_sample
from .under_way import UnderWay
from .warm_start import WarmStart


def train(config: Config, *, fresh: bool = False) -> int:
    """Trains as a config says, or goes on where its folder left off.

    Args:
        config: The config.
        fresh: Start anew; what the folder holds of a run is moved aside once the new one is ready to start.

    Returns:
        The exit code: 0 if finished, 75 if a signal stopped it, or the one of the callback that stopped it.

    Raises:
        UserError: A mistake in the config or in the files it names; nothing was lost.
        BadDataError: A value in the data is not allowed.
        DirectoryInUse: Another job owns run.dir.
        FolderUnavailable: The file system of run.dir cannot be written to.
        Diverged: The loss is no longer finite, and `train.not_finite` lets the run do nothing more about it.
    """
    with starts_with_the_others():
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
        warm = WarmStart(built) if config.checkpoint.start_from and not start else None
        display = stack.enter_context(make_display(config.train.steps, start, title(built)))
        for line in remarks(before, made_of, config.data.source, goes_on=start > 0):
            display.message(line)
        if no_sample := why_no_sample(built):
            display.message(no_sample)
        rollbacks = Rollbacks(config, folder, fresh=fresh)
        rollbacks.tell(display.message)
        ownership = stack.enter_context(Ownership(folder, display.message))
        around = Surroundings(
            built=built,
            folder=folder,
            checkpoints=checkpoints,
            display=display,
            ownership=ownership,
            gate=gate,
            guards=Guards(config, display.message, partial(saves_at, config)),
            rollbacks=rollbacks,
        )
        run = UnderWay(around, made_of, start, warm, compilation)

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
