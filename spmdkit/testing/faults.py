"""What a fault is: what happens, to which rank, at which step, in which phase; and how a process is told of it."""

# pyright: reportMissingImports=false

import json
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..mesh.errors import UserError

VARIABLE = "SPMDKIT_FAULT"
"""The environment variable that holds the faults of a run: a JSON list of objects, the fields of `Fault`."""
JOURNAL = "SPMDKIT_FAULT_JOURNAL"
"""The file in which injected faults are noted, so that none comes again after a restart."""

PHASES = {
    "start": "before the process joins the others",
    "compile": "before the step is compiled",
    "restore": "before a checkpoint is read; without a step",
    "read": "while the rows of a step's batch are read, in a thread of the reader",
    "data": "when the loop asks for the batch of a step",
    "batch": "when it has got that batch",
    "step": "before a step is started",
    "evaluation": "in the evaluation after a step",
    "save": "before the checkpoint of a step is begun",
    "save:folder": "before its temporary folder is made, by rank 0",
    "save:arrays": "when the first bytes of its arrays are on the disk",
    "save:metadata": "before its description is written, by rank 0",
    "save:commit": "before it gets its name, by rank 0",
    "save:removal": "before a checkpoint that is not kept gets another name, by rank 0; the step of that one",
    "finish": "after the last step, before the report is written",
}
KINDS = {
    "kill": "SIGKILL",
    "abort": "SIGABRT, as a failed assertion of native code",
    "segv": "a read of address 0",
    "exit": "ends at once with `code`, without a word",
    "raise": "an exception; with `error`, an OSError such as ENOSPC",
    "hang": "sleeps for ever",
    "hold": "sleeps for ever and holds Python's lock",
    "stop": "SIGSTOP",
    "signal": "gets `signals`, `seconds` apart",
    "pause": "sleeps for `seconds`, once",
    "slow": "sleeps for `seconds`, at every step from `step` on",
    "skip": "leaves this step out, and so its collectives; in phase step",
    "nan": "a value of the batch is not a number; in phase batch",
    "flip": "one bit of a parameter on one device is another; in phase step",
    "damage": "files of the newest checkpoint are damaged: `how`",
}
DAMAGES = ("flip", "truncate", "remove", "metadata", "empty")
ONLY_IN = {"skip": ("step",), "flip": ("step",), "nan": ("batch",)}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that goes wrong on purpose, once."""

    kind: str
    """One of KINDS."""
    phase: str = "step"
    """When in a step: one of PHASES."""
    rank: int | None = 0
    """Which process; None = every one."""
    step: int | None = None
    """The step, counted from 1; None = the first time that the phase begins."""
    times: int = 1
    """How often, over all attempts of a run; of a rank where it is every rank."""
    seconds: float = 1.0
    """Of pause, slow and signal."""
    signals: tuple[str, ...] = ("SIGTERM",)
    """Of signal."""
    code: int = 0
    """Of exit."""
    error: str = ""
    """Of raise: the name of an error of the system."""
    how: str = "flip"
    """Of damage: one of DAMAGES."""
    bit: int = 20
    """Of flip: which bit of the element."""
    element: int = 0
    """Of flip: which element of what the device holds; negative ones count from the end."""
    device: int = 0
    """Of flip: which device of the process."""
    parameter: str = ""
    """Of flip: a part of its path; empty = the first."""

    def __post_init__(self) -> None:
        """Refuses what cannot be injected.

        Raises:
            UserError: A name is unknown, or the kind does not go with the phase.
        """
        for name, value, known in (("kind", self.kind, KINDS), ("phase", self.phase, PHASES)):
            if value not in known:
                raise UserError(f"A fault of {name} {value!r} is not known; give one of {', '.join(known)}.")
        if self.phase not in ONLY_IN.get(self.kind, (self.phase,)):
            raise UserError(f"A fault of kind {self.kind} is injected in phase {ONLY_IN[self.kind][0]} only.")
        if self.how not in DAMAGES:
            raise UserError(f"how={self.how!r}: checkpoints are damaged by {', '.join(DAMAGES)}.")
        unknown = [name for name in self.signals if not hasattr(signal, name)]
        if unknown:
            raise UserError(f"signals={unknown}: no such signals; give names such as SIGTERM.")

    def __str__(self) -> str:
        where = "every rank" if self.rank is None else f"rank {self.rank}"
        return f"{self.kind} on {where}, {self.phase}{'' if self.step is None else f' of step {self.step}'}"


@dataclass(kw_only=True)
class Moment:
    """A place in a run where faults are injected; some change what it holds.

    Attributes:
        phase: One of PHASES.
        step: Counted from 1; None where there is none.
        state: The train state, in phase step.
        batch: Name -> global array, in phase batch.
        skipped: Whether the step is left out.
        checkpoints: The folder of checkpoints, once it is known.
    """

    phase: str
    step: int | None = None
    state: Any = None
    batch: Any = None
    skipped: bool = False
    checkpoints: Path | None = None


def as_text(faults: Sequence[Fault]) -> str:
    """Gives faults as the environment variable holds them."""
    default = {field.name: field.default for field in fields(Fault)}
    return json.dumps([{key: value for key, value in asdict(each).items() if value != default[key]} for each in faults])


def read_faults(text: str) -> tuple[Fault, ...]:
    """Reads the environment variable.

    Raises:
        UserError: It is no JSON list of faults.
    """
    try:
        found: Any = json.loads(text or "[]")
        return tuple(Fault(**{**each, "signals": tuple(each.get("signals", ("SIGTERM",)))}) for each in found)
    except (ValueError, TypeError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f'{VARIABLE}={text[:100]!r} is no list of faults such as \'[{{"kind": "kill", "rank": 1, "step": 7}}]\': '
            f"{error}."
        ) from None
