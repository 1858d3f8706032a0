"""Injected faults: their kinds, the moments at which they happen, and the journal of a run under faults."""

import ctypes
import errno
import json
import os
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

VARIABLE = "SPMDKIT_FAULT"
"""The environment variable with the faults of a run: a JSON list of objects with the fields of `Fault`."""
JOURNAL = "SPMDKIT_FAULT_JOURNAL"
"""The file that records injected faults, so that none is injected again after a restart."""

PHASES = {
    "start": "before the process joins the others",
    "compile": "before the step is compiled",
    "restore": "before a checkpoint is read; without a step",
    "read": "while the rows of a step's batch are read, in a thread of the reader",
    "data": "when the loop requests the batch of a step",
    "batch": "when the loop has received that batch",
    "step": "before a step is started",
    "evaluation": "in the evaluation after a step",
    "save": "before the checkpoint of a step is begun",
    "save:folder": "before its temporary directory is created, by rank 0",
    "save:arrays": "when the first bytes of its arrays are on disk",
    "save:metadata": "before its metadata is written, by rank 0",
    "save:commit": "before it is renamed to its final name, by rank 0",
    "save:removal": "before a checkpoint that is not kept is renamed, by rank 0; the step of that checkpoint",
    "finish": "after the last step, before the report is written",
}
ONLY_IN = {"skip": "step", "flip": "step", "nan": "batch"}
FOREVER = 100_000
"""Seconds."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault that is injected once. `kind` is a key of ACTIONS, which documents the kinds."""

    kind: str
    phase: str = "step"
    """One of PHASES."""
    rank: int | None = 0
    """None = every rank."""
    step: int | None = None
    """The step, counted from 1; None = the first time that the phase begins."""
    times: int = 1
    """The number of injections over all attempts of a run, for each rank."""
    seconds: float = 1.0
    """For pause, slow and signal."""
    signals: tuple[str, ...] = ("SIGTERM",)
    """For signal."""
    code: int = 0
    """For exit."""
    error: str = ""
    """For raise: the name of an errno such as ENOSPC."""
    how: str = "flip"
    """For damage: one of DAMAGES."""
    bit: int = 20
    """For flip: the bit of the element."""
    element: int = 0
    """For flip: the index in the device's shard; negative indices count from the end."""
    device: int = 0
    """For flip: the index of the device in the process."""
    parameter: str = ""
    """For flip: a part of the parameter's path; empty = the first parameter."""

    def __post_init__(self) -> None:
        if self.kind not in ACTIONS or self.phase not in PHASES or self.how not in DAMAGES:
            raise ValueError(f"unknown kind, phase or damage: {self}")
        if self.phase != ONLY_IN.get(self.kind, self.phase):
            raise ValueError(f"{self.kind} is injected in phase {ONLY_IN[self.kind]} only")

    def __str__(self) -> str:
        rank = "every rank" if self.rank is None else f"rank {self.rank}"
        return f"{self.kind} on {rank}, {self.phase}{'' if self.step is None else f' of step {self.step}'}"


@dataclass(kw_only=True)
class Moment:
    """A point in a run at which faults are injected; some faults change its values."""

    phase: str
    step: int | None = None
    state: Any = None
    batch: Any = None
    skipped: bool = False
    checkpoints: Path | None = None


def to_json(faults: Sequence[Fault]) -> str:
    """Returns the value of the environment variable."""
    default = {field.name: field.default for field in fields(Fault)}
    return json.dumps([{key: value for key, value in asdict(each).items() if value != default[key]} for each in faults])


def from_json(text: str) -> tuple[Fault, ...]:
    """Parses the environment variable."""
    found = json.loads(text or "[]")
    return tuple(Fault(**{**each, "signals": tuple(each.get("signals", ("SIGTERM",)))}) for each in found)


class Journal:
    """A file of events of a run under faults; None writes nothing.

    Every process and the launcher append one JSON line for each event, with the time of `time.monotonic`:

        fault      a fault is about to be injected: index, kind, rank, step, phase
        attempt    the launcher starts the processes
        training   a process is about to start the first step of an attempt: rank, step
        ended      all processes of an attempt have ended: exits (rank, code, stopped), cause, code
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def note(self, event: str, **values: Any) -> None:
        """Appends one event, in one write."""
        if self._path is None:
            return
        line = json.dumps({"event": event, "time": time.monotonic(), **values}) + "\n"
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    def events(self, event: str = "") -> list[dict[str, Any]]:
        """Returns the events so far, all or those of one name, in order."""
        if self._path is None or not self._path.exists():
            return []
        found = [json.loads(line) for line in self._path.read_text(encoding="utf-8").splitlines()]
        return [each for each in found if event in ("", each["event"])]


class Injector:
    """The faults of one process: injects each at its moment and records it in the journal."""

    def __init__(self, faults: Sequence[Fault], rank: int, journal: Journal) -> None:
        self.rank, self.journal = rank, journal
        self.checkpoints: Path | None = None
        self._faults = {index: fault for index, fault in enumerate(faults) if fault.rank in (None, rank)}
        self._done = Counter(each["index"] for each in journal.events("fault") if each["rank"] == rank)
        self._turn = threading.Lock()

    def has(self, prefix: str) -> bool:
        """Returns True if a fault's phase begins with the prefix."""
        return any(fault.phase.startswith(prefix) for fault in self._faults.values())

    def at(self, moment: Moment) -> Moment:
        """Injects the faults that are due; returns the moment, which a fault may have changed."""
        moment.checkpoints = self.checkpoints
        for index, fault in self._faults.items():
            if self._take(index, fault, moment):
                self.journal.note(
                    "fault", index=index, kind=fault.kind, rank=self.rank, step=moment.step, phase=moment.phase
                )
                ACTIONS[fault.kind](fault, moment)
            elif fault.kind == "slow" and self._is_slow(index, fault, moment):
                ACTIONS[fault.kind](fault, moment)
        return moment

    def _take(self, index: int, fault: Fault, moment: Moment) -> bool:
        if fault.phase != moment.phase or fault.step not in (None, moment.step):
            return False
        with self._turn:
            if self._done[index] >= fault.times:
                return False
            self._done[index] += 1
            return True

    def _is_slow(self, index: int, fault: Fault, moment: Moment) -> bool:
        """Returns True at every step after the one at which the rank became slow."""
        after = moment.step is not None and moment.step > (fault.step or 0)
        return fault.phase == moment.phase and after and self._done[index] > 0


class InjectedFault(RuntimeError):
    """Raised by a fault of kind raise."""


def _raise(fault: Fault, moment: Moment) -> None:
    if fault.error:
        number = getattr(errno, fault.error)
        raise OSError(number, os.strerror(number), f"injected: {fault}")
    raise InjectedFault(f"injected: {fault}")


def _signal(fault: Fault, moment: Moment) -> None:
    for number, name in enumerate(fault.signals):
        if number:
            time.sleep(fault.seconds)
        os.kill(os.getpid(), getattr(signal, name))


def _nan(fault: Fault, moment: Moment) -> None:
    """Changes the first element on this process's first device of a float input, or else of the weights."""
    import jax.numpy as jnp

    floats = [name for name, leaf in moment.batch.items() if jnp.issubdtype(leaf.dtype, jnp.floating)]
    name = min(floats, key=lambda each: (each == "weights", each))

    def spoil(shard: Any) -> None:
        shard.reshape(-1)[0] = float("nan")

    moment.batch = {**moment.batch, name: with_shard_changed(moment.batch[name], 0, spoil)}


def _flip(fault: Fault, moment: Moment) -> None:
    """Flips one bit of an element of a parameter, in the shard or copy of one device."""
    from spmdkit.layouts.paths import leaves_with_paths, map_with_path

    paths = [path for path, leaf in leaves_with_paths(moment.state.params) if leaf.size and leaf.dtype.itemsize == 4]
    chosen = next(path for path in paths if fault.parameter in path)

    def spoil(shard: Any) -> None:
        shard.reshape(-1).view(np.uint32)[fault.element] ^= np.uint32(1 << fault.bit)

    def flipped(path: str, leaf: Any) -> Any:
        return with_shard_changed(leaf, fault.device, spoil) if path == chosen else leaf

    moment.state = moment.state._replace(params=map_with_path(flipped, moment.state.params))


def _damage(fault: Fault, moment: Moment) -> None:
    directory = latest_checkpoint(moment.checkpoints) if moment.checkpoints else None
    if directory is not None:
        damage(directory, fault.how)


ACTIONS: dict[str, Callable[[Fault, Moment], Any]] = {
    "kill": lambda fault, moment: os.kill(os.getpid(), signal.SIGKILL),
    "abort": lambda fault, moment: os.abort(),  # as a failed assertion of native code
    "segv": lambda fault, moment: ctypes.string_at(0),
    "exit": lambda fault, moment: os._exit(fault.code),
    "raise": _raise,
    "hang": lambda fault, moment: time.sleep(FOREVER),
    "hold": lambda fault, moment: ctypes.PyDLL(None).sleep(FOREVER),  # PyDLL, unlike CDLL, keeps Python's lock
    "stop": lambda fault, moment: os.kill(os.getpid(), signal.SIGSTOP),
    "signal": _signal,
    "pause": lambda fault, moment: time.sleep(fault.seconds),
    "slow": lambda fault, moment: time.sleep(fault.seconds),  # at every step from `step` on
    "skip": lambda fault, moment: setattr(moment, "skipped", True),  # and with the step, its collectives
    "nan": _nan,
    "flip": _flip,
    "damage": _damage,
}
"""Kind of fault -> its effect on the process."""


def with_shard_changed(array: Any, device: int, change: Callable[[Any], None]) -> Any:
    """Returns a global array in which one device's shard differs; no other process takes part."""
    import jax

    shards = [shard.data for shard in array.addressable_shards]
    changed = np.array(shards[device], order="C")
    change(changed)
    shards[device] = jax.device_put(changed, array.addressable_shards[device].device)
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


DAMAGES = ("flip", "truncate", "remove", "metadata", "empty")


def latest_checkpoint(checkpoints: Path) -> Path | None:
    """Returns the directory of the latest complete checkpoint, if any."""
    steps = [each for each in checkpoints.glob("*") if each.name.isdecimal()] if checkpoints.is_dir() else []
    return max(steps, key=lambda each: int(each.name), default=None)


def damage(checkpoint: Path, how: str) -> None:
    """Flips a bit in each array file of a checkpoint, halves or removes them, or removes the metadata or all files."""
    if how == "empty":
        shutil.rmtree(checkpoint)
        checkpoint.mkdir()
        return
    files = [path for path in checkpoint.rglob("*METADATA*" if how == "metadata" else "d/*") if path.is_file()]
    assert files, f"{checkpoint} contains no files to damage"
    for path in files:
        content = bytearray(path.read_bytes())
        if how in ("remove", "metadata"):
            path.unlink()
        elif how == "truncate":
            path.write_bytes(content[: len(content) // 2])
        else:
            content[len(content) // 2] ^= 4
            path.write_bytes(content)


def flip_bit(array: Any, device: Any, *, byte: int = 0, bit: int = 0) -> Any:
    """Returns the array with one bit flipped in the shard of one local device."""

    def spoil(shard: Any) -> None:
        shard.reshape(-1).view(np.uint8)[byte] ^= np.uint8(1 << bit)

    devices = [shard.device for shard in array.addressable_shards]
    return with_shard_changed(array, devices.index(device), spoil)


def flip_in(tree: Any, path: str, device: Any, **where: int) -> Any:
    """Returns the pytree with one bit flipped in the array at a path."""
    from spmdkit.layouts.paths import map_with_path

    return map_with_path(lambda name, leaf: flip_bit(leaf, device, **where) if name == path else leaf, tree)
