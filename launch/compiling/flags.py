"""XLA_FLAGS, looked at before XLA reads them: it ends a process, with a stack, over one that it does not know.

A child process reads them first, in a third of a second; what is found good is noted beside the compiled programs, so
that the next start of the same flags and the same jaxlib asks nobody.
"""

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from ...mesh.errors import UserError

PROGRAM = "from jaxlib import xla_client; xla_client.make_cpu_client()"
UNKNOWN = re.compile(r"Unknown flags? in XLA_FLAGS: ([^\n]*)")
SECONDS = 120.0


def check_flags(environ: Mapping[str, str], notes: Path | None) -> None:
    """Makes sure that XLA knows what XLA_FLAGS name.

    Args:
        environ: Of this process.
        notes: A folder for what was found good; None = nothing is noted.

    Raises:
        UserError: It does not know some; they are named.
    """
    flags = environ.get("XLA_FLAGS", "").strip()
    if not flags:
        return
    known = f"{version('jaxlib')} {flags}"
    note = notes / f"flags-{hashlib.sha256(known.encode()).hexdigest()[:16]}.known" if notes else None
    if note and os.path.exists(note):  # False where the folder cannot be entered, of which Path.exists() is an error
        return
    if unknown := unknown_flags(environ):
        raise UserError(
            f"XLA_FLAGS={flags}: XLA of jaxlib {version('jaxlib')} does not know {unknown}, and would end the process. "
            "Take it out of XLA_FLAGS, or look for its new name; run.xla takes options of the step alone."
        )
    with suppress(OSError):
        if note:
            note.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            note.write_text(known, encoding="utf-8")


def unknown_flags(environ: Mapping[str, str]) -> str:
    """What of XLA_FLAGS XLA does not know, as it says it; "" where it knows all, or says something else."""
    with suppress(subprocess.TimeoutExpired, OSError):
        child = subprocess.run(
            [sys.executable, "-P", "-c", PROGRAM],
            env=dict(environ),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
        )
        found = UNKNOWN.search(child.stderr)
        return found[1].strip().removesuffix(".") if found and child.returncode else ""
    return ""
