"""Runs planning commands in processes of their own, because compilers can end a process: by its memory, or by a signal.

The files that they write go into a directory that is removed with the processes.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from ..mesh.errors import UserError

PACKAGE = __name__.partition(".")[0]
INSIDE = "SPMDKIT_INSIDE_PLAN"
"""Set in the process that compiles."""
POLL_SECONDS = 0.05
STILL_COMPILING = "it was still compiling at the time limit"
"""The problem of a candidate that the time limit ended."""
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
    home = Path(str(import_module(PACKAGE).__file__)).parents[1]
    stopped: list[int] = []
    before = {each: signal.signal(each, lambda number, _: stopped.append(number)) for each in STOPS}
    try:
        with tempfile.TemporaryDirectory(prefix="spmdkit-plan-") as folder:
            paths = os.pathsep.join(filter(None, [str(home), os.environ.get("PYTHONPATH")]))
            child = _start(words, {**environment, INSIDE: "1", "TMPDIR": folder, "PYTHONPATH": paths})
            while child.poll() is None and not stopped:
                time.sleep(POLL_SECONDS)
            code = _kill(child)
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


class Outcome(NamedTuple):
    """The result of compiling one candidate.

    Attributes:
        plan: What `spmdkit plan --json` printed; None if it failed.
        problem: Why it failed, in one line; "" otherwise.
    """

    plan: dict[str, Any] | None
    problem: str

    @property
    def is_late(self) -> bool:
        """True if the time limit ended it."""
        return self.problem == STILL_COMPILING


class Compilations:
    """Processes that compile candidates of a search; on exit, all of them are killed and their files removed."""

    def __init__(self, target: str, environment: Mapping[str, str]) -> None:
        """Prepares a directory for the configs of the candidates.

        Args:
            target: The accelerators, as the user wrote them.
            environment: Variables of the processes, besides those of this process.
        """
        self.target, self.environment = target, environment
        self.folder = tempfile.TemporaryDirectory(prefix="spmdkit-search-")
        self.processes: dict[int, subprocess.Popen[Any]] = {}
        self.started = 0

    def __enter__(self) -> "Compilations":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            _kill(process)
        self.folder.cleanup()

    def start(self, resolved_yaml: str) -> int:
        """Starts to compile the step of a config, and returns the number of its process."""
        number, self.started = self.started, self.started + 1
        config = self._file(number, "yaml")
        config.write_text(resolved_yaml, encoding="utf-8")
        words = ["plan", str(config), "--target", self.target, "--json"]
        with self._file(number, "json").open("wb") as out, self._file(number, "log").open("wb") as log:
            self.processes[number] = _start(words, self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=log)
        return number

    def wait(self, deadline: float) -> tuple[int, Outcome] | None:
        """Waits for one of the processes.

        Args:
            deadline: The time of `time.monotonic()` at which the wait ends.

        Returns:
            The number of a process that ended, and its result; None at the deadline.
        """
        while time.monotonic() < deadline:
            for number, process in self.processes.items():
                if process.poll() is not None:
                    del self.processes[number]
                    return number, self._outcome(number, process.returncode)
            time.sleep(POLL_SECONDS)
        return None

    def _file(self, number: int, suffix: str) -> Path:
        return Path(self.folder.name) / f"{number}.{suffix}"

    def _outcome(self, number: int, code: int) -> Outcome:
        if code == 0:
            return Outcome(json.loads(self._file(number, "json").read_text(encoding="utf-8")), "")
        if code < 0:
            return Outcome(None, f"the compiler was killed by {signal.Signals(-code).name}")
        lines = self._file(number, "log").read_text(encoding="utf-8", errors="replace").splitlines()
        problem = next((line for line in lines if "rror" in line), lines[-1] if lines else "no output")
        return Outcome(None, f"exit code {code}: {problem.strip()[:200]}")


def _start(words: Sequence[str], environment: Mapping[str, str], **streams: Any) -> "subprocess.Popen[Any]":
    """Starts `spmdkit WORDS` in a session of its own, with variables besides those of this process."""
    command = [sys.executable, "-P", "-m", PACKAGE, *words]
    return subprocess.Popen(command, env={**os.environ, **environment}, start_new_session=True, **streams)


def _kill(process: "subprocess.Popen[Any]") -> int:
    """Ends a process, if it still runs, with everything that it started; returns its exit code."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()
