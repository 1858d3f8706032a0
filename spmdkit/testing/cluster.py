"""A run of a config in real processes, under way: started, watched, disturbed, and cleaned up.

As a fixture of pytest:

    @pytest.fixture
    def run(tmp_path):
        with cluster(tmp_path / "tiny.yaml", processes=2, devices=2) as under_way:
            yield under_way
"""

# pyright: reportMissingImports=false

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from ..configs import load_config
from .faults import JOURNAL, VARIABLE, Fault, as_text
from .journal import Journal

POLL_SECONDS = 0.02
START_LINE = re.compile(r"^--- .* process (\d+): ", re.MULTILINE)


class Ended(NamedTuple):
    """How a run ended.

    Attributes:
        code: The launcher's exit code.
        exits: Exit code of each rank in the last attempt; a negative one is the signal that killed it.
        stdout: What the processes printed, each line after its rank.
        stderr: The same, with the launcher's lines.
    """

    code: int
    exits: dict[int, int]
    stdout: str
    stderr: str


class Cluster:
    """The processes of a run, of which this machine is the whole cluster."""

    def __init__(self, folder: Path, launcher: subprocess.Popen[bytes], journal: Journal, output: Path) -> None:
        """Takes what `cluster` has started."""
        self.folder = folder
        """`run.dir`."""
        self.launcher = launcher
        self.journal = journal
        """What was injected and when, and how each attempt ended."""
        self._output = output

    @property
    def pids(self) -> dict[int, int]:
        """Process id of each rank, of the newest attempt."""
        found: dict[int, int] = {}
        for path in sorted((self.folder / "logs").glob("rank-*.log")):
            started = START_LINE.findall(path.read_text(encoding="utf-8", errors="replace"))
            if started:
                found[int(path.stem.removeprefix("rank-"))] = int(started[-1])
        return found

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The records of metrics.jsonl so far."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        found = []
        for line in lines:
            with suppress(ValueError):  # the last one may be half written
                found.append(json.loads(line))
        return found

    @property
    def step(self) -> int:
        """The last step in metrics.jsonl; 0 where there is none."""
        return max((record["step"] for record in self.metrics if isinstance(record, dict)), default=0)

    @property
    def checkpoints(self) -> list[int]:
        """The steps of complete checkpoints."""
        return sorted(int(each.name) for each in (self.folder / "checkpoints").glob("*") if each.name.isdecimal())

    def log(self, rank: int) -> str:
        """All that a rank has printed, over all attempts."""
        path = self.folder / "logs" / f"rank-{rank}.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def output(self) -> tuple[str, str]:
        """What the launcher has printed so far: stdout and stderr."""
        out, err = (self._output / name for name in ("stdout", "stderr"))
        return out.read_text(encoding="utf-8", errors="replace"), err.read_text(encoding="utf-8", errors="replace")

    def wait_until(self, what: Callable[[], Any], seconds: float = 120) -> None:
        """Waits until something is true.

        Raises:
            TimeoutError: It is not, or the run has ended meanwhile; with what was printed.
        """
        deadline = time.monotonic() + seconds
        while not what():
            ended = self.launcher.poll() is not None
            if ended and what():
                return
            if ended or time.monotonic() > deadline:
                said = "the run has ended" if ended else f"{seconds:.0f} s have passed"
                raise TimeoutError(f"{said} at step {self.step}.\n" + "\n".join(self.output())[-4000:])
            time.sleep(POLL_SECONDS)

    def wait_for_step(self, number: int, seconds: float = 120) -> None:
        """Waits until a step is in metrics.jsonl.

        Raises:
            TimeoutError: It did not come.
        """
        self.wait_until(lambda: self.step >= number, seconds)

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Sends a signal to one rank."""
        os.kill(self.pids[rank], number)

    def wait(self, seconds: float = 240) -> Ended:
        """Waits for the end of the run.

        Raises:
            TimeoutError: It did not come; all is killed then.
        """
        try:
            code = self.launcher.wait(seconds)
        except subprocess.TimeoutExpired:
            self.end()
            said = "\n".join(self.output())[-4000:]
            raise TimeoutError(f"The run did not end within {seconds:.0f} s.\n{said}") from None
        attempts = self.journal.events("ended")
        exits = {rank: status for rank, status, _ in attempts[-1]["exits"]} if attempts else {}
        return Ended(code, exits, *self.output())

    def end(self) -> None:
        """Kills what is left: the launcher, and with it, by its guard, every process that it started."""
        pids = self.pids
        with suppress(ProcessLookupError):
            self.launcher.kill()
        self.launcher.wait()
        for pid in pids.values():
            _gone(pid)


@contextmanager
def cluster(
    config: str | Path,
    *,
    processes: int,
    devices: int,
    faults: Sequence[Fault] = (),
    overrides: Sequence[str] = (),
    restarts: int = 0,
    fresh: bool = False,
    environment: Mapping[str, str] | None = None,
    journal: Path | None = None,
) -> Iterator[Cluster]:
    """Starts a run in several processes on this machine, as `spmdkit launch --on local:PxD` does.

    Args:
        config: A YAML file or the name of a preset.
        processes: How many, at least 1.
        devices: CPU devices that each of them simulates.
        faults: What goes wrong, where and when; each once, over all attempts.
        overrides: `key=value` each.
        restarts: As `--restarts`.
        fresh: As `--fresh`.
        environment: All variables of the processes, in place of this process's.
        journal: Where to note what was injected; give the one of an earlier run to go on with it, so that no fault
            comes twice. A temporary file by default.

    Yields:
        The run under way. When the `with` block is left, no process of it is.

    Raises:
        UserError: The config cannot be used.
    """
    run_dir = Path(load_config(str(config), overrides, num_processes=processes, simulate=devices).run.dir).absolute()
    words = ["launch", str(config), *overrides, "--on", f"local:{processes}x{devices}", "--restarts", str(restarts)]
    with tempfile.TemporaryDirectory(prefix="spmdkit-cluster-") as name:
        output, notes = Path(name), journal or Path(name) / "journal.jsonl"
        variables = {VARIABLE: as_text(faults), JOURNAL: str(notes)}
        with (output / "stdout").open("wb") as out, (output / "stderr").open("wb") as err:
            launcher = subprocess.Popen(
                [sys.executable, "-P", "-m", "spmdkit.testing.worker", *words, *(["--fresh"] if fresh else [])],
                env={**(os.environ if environment is None else environment), **variables},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        under_way = Cluster(run_dir, launcher, Journal(notes), output)
        try:
            yield under_way
        finally:
            under_way.end()


def _gone(pid: int, seconds: float = 10.0) -> None:
    """Waits until a process is gone, or only its zombie is left."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return
        if state in "ZX":
            return
        time.sleep(POLL_SECONDS)
