"""Runs a planning command in a process of its own, because compilers can end a process: by its memory, or by a signal.

The files that compilers write go into a directory that is removed with the process.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

from ..mesh.errors import UserError

INSIDE = "SPMDKIT_INSIDE_PLAN"
"""Set in the process that compiles."""
POLL_SECONDS = 0.05
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_apart(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs `spmdkit WORDS` in a process, with the input and outputs of this one.

    Args:
        words: The command and its arguments.
        environment: Variables to set for it.

    Returns:
        Its exit code.

    Raises:
        UserError: The process was killed, or this one was told to stop; nothing remains of it.
    """
    package = import_module(__name__.partition(".")[0])
    home = Path(str(package.__file__)).parents[1]
    stopped: list[int] = []
    before = {each: signal.signal(each, lambda number, _: stopped.append(number)) for each in STOPS}
    try:
        with TemporaryDirectory(prefix="spmdkit-plan-") as folder:
            paths = os.pathsep.join(filter(None, [str(home), os.environ.get("PYTHONPATH")]))
            given = {**os.environ, **environment, INSIDE: "1", "TMPDIR": folder, "PYTHONPATH": paths}
            command = [sys.executable, "-P", "-m", package.__name__, *words]
            child = subprocess.Popen(command, env=given, start_new_session=True)
            while child.poll() is None and not stopped:
                time.sleep(POLL_SECONDS)
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # also what the process started
            code = child.wait()
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    if stopped:
        raise UserError(f"the plan was stopped by {signal.Signals(stopped[0]).name}: nothing was written.")
    if code < 0:
        cause = "often by the system because memory ran out" if code == -signal.SIGKILL else "by its own error"
        raise UserError(
            f"the compilation was killed ({signal.Signals(-code).name}), {cause}: nothing was written. Close other "
            "programs, or plan with fewer microbatches or a smaller train.global_batch."
        )
    return code
