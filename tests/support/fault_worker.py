"""The command line of spmdkit with the faults of SPMDKIT_FAULT: `python -m support.fault_worker train my.yaml`.

It wraps the functions that begin the phases of a run, and finds the phases of a save in audit events and files.
"""

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from support.faults import JOURNAL, VARIABLE, Injector, Journal, Moment, from_json

MODULE = "support.fault_worker"
TRAINING_RUN = "spmdkit.runtime.training_run"
CHECKPOINTS = "spmdkit.checkpoints.manager:Checkpoints"
BEFORE = {
    "start": "spmdkit.runtime.build_run:prepare_devices",
    "compile": f"{TRAINING_RUN}:explain_built",
    "restore": f"{CHECKPOINTS}.restore_newest",
    "finish": f"{TRAINING_RUN}:TrainingRun.finish",
}
"""Phase -> the function that begins it."""
TEMPORARY = re.compile(r"/(\d+)\.orbax-checkpoint-tmp[^/]*(.*)$")
FINAL = re.compile(r"/(\d+)$")
REMOVED = re.compile(r"/removed-(\d+)")
DESCRIPTIONS = ("/state.orbax-checkpoint-tmp/_METADATA", "/_METADATA")
POLL_SECONDS = 0.0005
MAX_WATCH_SECONDS = 600.0


def install(injector: Injector) -> None:
    """Makes this process call the injector at every moment."""
    for phase, where in BEFORE.items():
        replace(where, lambda original, phase=phase: _injecting(original, injector, phase))
    replace("spmdkit.runtime.rollbacks:train_batches", lambda original: _batches(original, injector))
    replace("spmdkit.training.callbacks.fit:run_steps", lambda original: _steps(original, injector))
    replace("spmdkit.runtime.guards.watchdog:Watchdog.note", lambda original: _notes(original, injector))
    replace(f"{CHECKPOINTS}.__init__", lambda original: _opening(original, injector))
    replace(f"{CHECKPOINTS}.save", lambda original: _saving(original, injector))
    if injector.has("save:"):
        sys.addaudithook(lambda event, arguments: _audit(event, arguments, injector))


def replace(where: str, make: Callable[[Any], Any]) -> None:
    """Replaces the function or method "module:name" or "module:Class.name" with `make(original)`."""
    module, _, path = where.partition(":")
    owner: Any = import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    setattr(owner, name, make(getattr(owner, name)))


def _injecting(original: Callable[..., Any], injector: Injector, phase: str) -> Callable[..., Any]:
    def injecting(*arguments: Any, **options: Any) -> Any:
        injector.at(Moment(phase=phase))
        return original(*arguments, **options)

    return injecting


def _batches(original: Callable[..., Any], injector: Injector) -> Callable[..., Any]:
    """Wraps the training batches: the requests of the loop, and the reads of a thread before them."""

    def train_batches(*arguments: Any, **options: Any) -> Any:
        if injector.has("read"):
            replace(
                "spmdkit.data.batches:source_order", lambda order: _reading(order, options["global_batch"], injector)
            )
        return injected(original(*arguments, **options), options["start_step"])

    def injected(batches: Any, start: int) -> Iterator[Any]:
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
    """A step that calls the injector before it starts."""

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
    """Waits for the first array file of a save."""
    folder, deadline = injector.checkpoints, time.monotonic() + MAX_WATCH_SECONDS
    while folder is not None and time.monotonic() < deadline and not (folder / str(step)).exists():
        if next(folder.glob(f"{step}.orbax-checkpoint-tmp*/*/ocdbt.process_{injector.rank}/d/*"), None):
            injector.at(Moment(phase="save:arrays", step=step))
            return
        time.sleep(POLL_SECONDS)


def _audit(event: str, arguments: tuple[Any, ...], injector: Injector) -> None:
    """Finds the phases of a save in file system calls."""
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
    """Returns True if an `open` event is for writing, by its mode or its flags."""
    mode, flags = arguments[1], arguments[2]
    return any(letter in mode for letter in "wax+") if isinstance(mode, str) else bool(flags & 3)


def main(words: Sequence[str]) -> int:
    """Runs `spmdkit` with these arguments under faults; returns its exit code."""
    from spmdkit.launch.cli import main as spmdkit

    path = os.environ.get(JOURNAL)
    journal = Journal(Path(path) if path else None)
    if words[:1] == ["launch"]:
        replace("spmdkit.launch.launchers:LaunchJob.command", _worker_command)
        replace("spmdkit.launch.supervision.attempts:run_processes", lambda original: _recording(original, journal))
    else:
        rank = int(os.environ.get("SPMDKIT_PROCESS_ID") or 0)
        install(Injector(from_json(os.environ.get(VARIABLE, "")), rank, journal))
    return spmdkit(words)


def _worker_command(original: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """Starts the launcher's processes with this module in place of spmdkit."""

    def worker_command(*arguments: Any, **options: Any) -> list[str]:
        return [MODULE if word == "spmdkit" else word for word in original(*arguments, **options)]

    return worker_command


def _recording(original: Callable[..., Any], journal: Journal) -> Callable[..., Any]:
    def run_processes(*arguments: Any, **options: Any) -> Any:
        journal.note("attempt")
        outcome = original(*arguments, **options)
        cause = outcome.cause
        exits = [[end.rank, end.code, end.stopped] for end in outcome.exits]
        journal.note("ended", exits=exits, cause=list(cause) if cause else None, code=outcome.exit_code)
        return outcome

    return run_processes


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
