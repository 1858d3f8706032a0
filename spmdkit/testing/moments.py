"""Where the phases of a run begin: the functions that are replaced, in a process under test, by ones that ask first.

Phases of a save are found by what is done to the file system (Python's audit events), and by the first file of arrays
that appears there, since native code writes it. A function that has another name now is an error at once.
"""

# pyright: reportMissingImports=false

import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from .faults import Moment
from .injector import Injector

TRAIN, UNDER_WAY = "spmdkit.launch.run.train", "spmdkit.launch.run.under_way"
CHECKPOINTS = "spmdkit.training.checkpointing.checkpoints:Checkpoints"
BEFORE = {
    "start": f"{TRAIN}:prepare_devices",
    "compile": f"{UNDER_WAY}:explain_built",
    "restore": f"{CHECKPOINTS}.restore_newest",
    "finish": f"{UNDER_WAY}:finish",
}
"""Phase -> the function before which it is."""
TEMPORARY = re.compile(r"/(\d+)\.orbax-checkpoint-tmp[^/]*(.*)$")
FINAL = re.compile(r"/(\d+)$")
REMOVED = re.compile(r"/removed-(\d+)")
DESCRIPTIONS = ("/state.orbax-checkpoint-tmp/_METADATA", "/_METADATA")
POLL_SECONDS = 0.0005
LONGEST_WATCH = 600.0
"""Seconds to wait for the first file of arrays."""


def install(injector: Injector) -> None:
    """Makes this process ask the injector at every moment; called before the command line.

    Raises:
        AttributeError: A function that a phase begins with is not where it was.
    """
    for phase, where in BEFORE.items():
        replace(where, lambda original, phase=phase: _asking(original, injector, phase))
    replace("spmdkit.launch.run.batches:train_batches", lambda original: _batches(original, injector))
    replace(f"{UNDER_WAY}:run_steps", lambda original: _steps(original, injector))
    replace("spmdkit.training.watching.watchdog:Watchdog.note", lambda original: _notes(original, injector))
    replace(f"{CHECKPOINTS}.__init__", lambda original: _opening(original, injector))
    replace(f"{CHECKPOINTS}.save", lambda original: _saving(original, injector))
    if injector.has("save:"):
        sys.addaudithook(lambda event, arguments: _audit(event, arguments, injector))


def replace(where: str, make: Callable[[Any], Any]) -> None:
    """Replaces a function or method.

    Args:
        where: "module:name" or "module:Class.name".
        make: Gives the new one, told the old one.
    """
    module, _, path = where.partition(":")
    owner: Any = import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    setattr(owner, name, make(getattr(owner, name)))


def _asking(original: Callable[..., Any], injector: Injector, phase: str) -> Callable[..., Any]:
    def asking(*arguments: Any, **options: Any) -> Any:
        injector.at(Moment(phase=phase))
        return original(*arguments, **options)

    return asking


def _batches(original: Callable[..., Any], injector: Injector) -> Callable[..., Any]:
    """The batches of training: what the loop asks for, and what a thread reads before."""

    def train_batches(*arguments: Any, **options: Any) -> Any:
        if injector.has("read"):
            replace(
                "spmdkit.data.batches:source_order", lambda order: _reading(order, options["global_batch"], injector)
            )
        return asked(original(*arguments, **options), options["start_step"])

    def asked(batches: Any, start: int) -> Iterator[Any]:
        number = start
        try:
            while True:
                number += 1
                injector.at(Moment(phase="data", step=number))
                batch = next(batches, None)
                if batch is None:
                    return
                yield injector.at(Moment(phase="batch", step=number, batch=batch)).batch
        finally:
            batches.close()

    return train_batches


def _reading(original: Callable[..., Any], global_batch: int, injector: Injector) -> Callable[..., Any]:
    def source_order(samples: Any, **options: Any) -> Any:
        injector.at(Moment(phase="read", step=int(samples[0]) // global_batch + 1))
        return original(samples, **options)

    return source_order


def _steps(original: Callable[..., Any], injector: Injector) -> Callable[..., Any]:
    def run_steps(step: Any, *arguments: Any, **options: Any) -> Any:
        return original(_Step(step, options.get("start", 0), injector), *arguments, **options)

    return run_steps


class _Step:
    """A step that asks before it is started."""

    def __init__(self, step: Any, start: int, injector: Injector) -> None:
        self._step, self._number, self._injector = step, start, injector
        self._metrics: Any = None

    def __call__(self, state: Any, batch: Any) -> Any:
        self._number += 1
        if self._metrics is None:
            self._injector.journal.note("training", rank=self._injector.rank, step=self._number)
        moment = self._injector.at(Moment(phase="step", step=self._number, state=state))
        if moment.skipped and self._metrics is not None:
            return moment.state, self._metrics
        state, self._metrics = self._step(moment.state, batch)
        return state, self._metrics

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)


def _notes(original: Callable[..., Any], injector: Injector) -> Callable[..., Any]:
    def note(self: Any, step: int, phase: str) -> None:
        original(self, step, phase)
        if phase == "evaluation":
            injector.at(Moment(phase=phase, step=step))

    return note


def _opening(original: Callable[..., Any], injector: Injector) -> Callable[..., Any]:
    def opening(self: Any, directory: Path, **options: Any) -> None:
        injector.checkpoints = Path(directory).absolute()
        original(self, directory, **options)

    return opening


def _saving(original: Callable[..., Any], injector: Injector) -> Callable[..., Any]:
    def save(self: Any, step: int, *arguments: Any, **options: Any) -> None:
        injector.at(Moment(phase="save", step=step))
        if injector.has("save:arrays"):
            threading.Thread(target=_watch_arrays, args=(step, injector), daemon=True).start()
        original(self, step, *arguments, **options)

    return save


def _watch_arrays(step: int, injector: Injector) -> None:
    """Waits for the first file of arrays of a save, whichever process writes it."""
    folder, deadline = injector.checkpoints, time.monotonic() + LONGEST_WATCH
    while folder is not None and time.monotonic() < deadline and not (folder / str(step)).exists():
        if next(folder.glob(f"{step}.orbax-checkpoint-tmp*/*/ocdbt.process_{injector.rank}/d/*"), None):
            injector.at(Moment(phase="save:arrays", step=step))
            return
        time.sleep(POLL_SECONDS)


def _audit(event: str, arguments: tuple[Any, ...], injector: Injector) -> None:
    """Finds the phases of a save in what is asked of the file system."""
    if event == "os.mkdir":
        found = TEMPORARY.search(str(arguments[0]))
        if found and not found.group(2):
            injector.at(Moment(phase="save:folder", step=int(found.group(1))))
    elif event == "open" and str(arguments[0]).endswith("METADATA") and _writes(arguments):
        found = TEMPORARY.search(str(arguments[0]))
        if found and found.group(2) in DESCRIPTIONS:
            injector.at(Moment(phase="save:metadata", step=int(found.group(1))))
    elif event == "os.rename":
        _audit_rename(str(arguments[0]), str(arguments[1]), injector)


def _audit_rename(before: str, after: str, injector: Injector) -> None:
    found, removed = FINAL.search(after), REMOVED.search(after)
    if found and TEMPORARY.search(before):
        injector.at(Moment(phase="save:commit", step=int(found.group(1))))
    elif removed:
        injector.at(Moment(phase="save:removal", step=int(removed.group(1))))


def _writes(arguments: tuple[Any, ...]) -> bool:
    """Whether a file is opened for writing: the mode says so, or the flags where there is none."""
    mode, flags = arguments[1], arguments[2]
    return any(letter in mode for letter in "wax+") if isinstance(mode, str) else bool(flags & 3)
