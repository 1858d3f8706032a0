"""What compiling came to: a line for people, and compilation.json in the folder of the run.

compilation.json holds what is in force (XLA_FLAGS, options of the step, where programs are kept) and what it came to
(programs, those that were read instead of compiled, seconds), of the last start of the run in process 0.
"""

import functools
import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax

from ...mesh.files import write_text
from ...mesh.processes import is_main_process
from .cache import Place
from .options import XlaOptions

NAME = "compilation.json"
HIT = "/jax/compilation_cache/cache_hits"
COMPILED = "/jax/core/compile/backend_compile_duration"


class Compiled(NamedTuple):
    """What a process has compiled.

    Attributes:
        programs: How many.
        read: How many of them were read from where programs are kept.
        seconds: All that took.
    """

    programs: int
    read: int
    seconds: float


class Compilation:
    """What is compiled from here on, by this process.

    Args:
        place: Where programs are kept.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self._before = compiled()

    @property
    def found(self) -> Compiled:
        """What was compiled so far."""
        now = compiled()
        before = self._before
        return Compiled(now.programs - before.programs, now.read - before.read, now.seconds - before.seconds)

    def line(self) -> str:
        """What was compiled so far, for people."""
        found = self.found
        read = f", {found.read} of them read from {self.place.folder}" if self.place.folder else f"; {self.place}"
        return f"Compiled {found.programs} programs in {found.seconds:.1f} s{read}."

    def write(self, folder: Path, options: XlaOptions) -> None:
        """Writes compilation.json in process 0, in one piece.

        Args:
            folder: Of the run.
            options: What the step was compiled with.
        """
        if not is_main_process():
            return
        device = jax.devices()[0]
        record = {
            "jax": version("jax"),
            "jaxlib": version("jaxlib"),
            "devices": f"{jax.device_count()} x {device.device_kind} ({device.platform})",
            "xla_flags": os.environ.get("XLA_FLAGS", "").strip(),
            "options": dict(options.used),
            "left_out": dict(options.left_out),
            "kept_in": str(self.place),
            **{**self.found._asdict(), "seconds": round(self.found.seconds, 3)},
        }
        write_text(folder / NAME, json.dumps(record, indent=2) + "\n")


def compiled() -> Compiled:
    """What this process has compiled since this was called first."""
    counts = _counts()
    return Compiled(int(counts[COMPILED]), int(counts[HIT]), counts["seconds"])


@functools.cache
def _counts() -> dict[str, float]:
    """Counts what JAX tells of, from now on."""
    counts = {COMPILED: 0.0, HIT: 0.0, "seconds": 0.0}

    def happened(event: str, **about: Any) -> None:
        if event == HIT:
            counts[HIT] += 1

    def took(event: str, duration_secs: float, **about: Any) -> None:
        if event == COMPILED:
            counts[COMPILED] += 1
            counts["seconds"] += duration_secs

    jax.monitoring.register_event_listener(happened)
    jax.monitoring.register_event_duration_secs_listener(took)
    return counts
