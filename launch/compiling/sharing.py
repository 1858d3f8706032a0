"""What the processes of a run agree on before one of them reads a compiled program: the folder, and its programs.

On GPUs the processes of a run tune a program together. One that read it while another compiles it would leave that one
waiting for its share for ever. So all get the same answer for each program: process 0 lists what is kept, in a file in
the folder; each process says which of these it lacks; the rest is read, and everything else is compiled by all, also
what another run has added meanwhile. A listed program that is gone or damaged when it is read ends the process.
"""

import json
import uuid
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import jax

from ...mesh.compat import coordination_client
from ...mesh.coordination import exchange

NOT_ONE = "the processes of this run do not see one folder there"
MARK = ".mark"


class Shared(NamedTuple):
    """What the processes of a run may read.

    Attributes:
        problem: Why nothing; "" = something.
        keys: The programs that every process sees; None = any, in a run of one process or where JAX looks after them.
    """

    problem: str
    keys: frozenset[str] | None = None


def agree(kind: str, folder: Path | None, kept: Iterable[str], seconds: float) -> Shared:
    """Settles what the processes of a run read; every process calls it once, and does nothing in a run of one.

    Args:
        kind: Who looks after the programs; where it differs between processes nothing is read.
        folder: Where this process would keep programs; None = on no disk, and there is nothing to compare but the kind.
        kept: The keys that this process sees there.
        seconds: How long to wait for the other processes.

    Raises:
        ProcessesMissing: Some did not answer in time.
    """
    if coordination_client() is None or jax.process_count() == 1:
        return Shared("")
    mark = folder / f"{uuid.uuid4().hex}{MARK}" if folder and jax.process_index() == 0 else None
    try:
        return _compare(kind, folder, frozenset(kept), mark, seconds)
    finally:
        if mark:
            with suppress(OSError):
                mark.unlink(missing_ok=True)


def _compare(kind: str, folder: Path | None, kept: frozenset[str], mark: Path | None, seconds: float) -> Shared:
    """Exchanges the kinds and the name of the mark, then what each process lacks of the list in it."""
    if mark:
        with suppress(OSError):
            mark.write_text(json.dumps(sorted(kept)), encoding="utf-8")
    said = json.dumps([kind, mark.name if mark else ""])
    kinds, names = zip(*map(json.loads, exchange("cache", said, seconds=seconds)), strict=True)
    listed = _list_in(folder / names[0]) if folder and names[0] else None
    lacks = None if listed is None else sorted(listed - kept)
    lacking = [json.loads(each) for each in exchange("cache is seen", json.dumps(lacks), seconds=seconds)]
    if len({*kinds}) > 1:
        return Shared(NOT_ONE)
    if folder is None and not any(names):
        return Shared("")
    return Shared(NOT_ONE) if listed is None or None in lacking else Shared("", listed.difference(chain(*lacking)))


def _list_in(mark: Path) -> frozenset[str] | None:
    """The keys that process 0 has listed; None where this process does not see its file."""
    try:
        return frozenset(json.loads(mark.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None
