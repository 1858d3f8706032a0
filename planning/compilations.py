"""Compiles candidates of a search in separate processes, each of which runs `spmdkit plan`."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ..configs.config_text import resolved_yaml
from ..configs.launch_config import LaunchConfig
from ..configs.schema import Config
from .candidates import Candidate

POLL_SECONDS = 0.1


class Outcome(NamedTuple):
    """The result of compiling one candidate.

    Attributes:
        plan: What `spmdkit plan --json` printed; None if it failed.
        problem: Why it failed, in one line; "" otherwise.
    """

    plan: dict[str, Any] | None
    problem: str


class Compilations:
    """Processes that compile candidates; on exit, all of them are killed and their files removed."""

    def __init__(self, config: Config, target: str, environment: Mapping[str, str]) -> None:
        """Prepares a directory for the configs of the candidates.

        Args:
            config: The run's configuration.
            target: The accelerators, as the user wrote them.
            environment: Variables of the processes, besides those of this process.
        """
        self.config = replace(config, launch=LaunchConfig())
        self.target, self.environment = target, {**os.environ, **environment}
        self.folder = tempfile.TemporaryDirectory(prefix="spmdkit-search-")
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.started = 0

    def __enter__(self) -> "Compilations":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.folder.cleanup()

    def start(self, candidate: Candidate) -> int:
        """Starts to compile a candidate, and returns the number of its process."""
        number, self.started = self.started, self.started + 1
        config, printed = self._file(number, "yaml"), self._file(number, "json")
        config.write_text(resolved_yaml(candidate.configure(self.config)), encoding="utf-8")
        command = [sys.executable, "-P", "-m", "spmdkit", "plan", str(config), "--target", self.target, "--json"]
        with printed.open("wb") as out, self._file(number, "log").open("wb") as log:
            self.processes[number] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=log, env=self.environment, start_new_session=True
            )
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
