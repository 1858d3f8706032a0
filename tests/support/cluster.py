"""A run of a config in real processes: starts it, watches it, injects faults, and cleans up."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from spmdkit.configs import load_config
from support.faults import JOURNAL, VARIABLE, Fault, Journal, to_json
from support.processes import assert_gone

TESTS = Path(__file__).resolve().parents[1]
POLL_SECONDS = 0.02
START_LINE = re.compile(r"^--- .* process (\d+): ", re.MULTILINE)


class Ended(NamedTuple):
    """The end of a run."""

    code: int
    exits: dict[int, int]
    stdout: str
    stderr: str


class Cluster:
    """The processes of a run on this machine."""

    def __init__(self, folder: Path, launcher: subprocess.Popen[bytes], journal: Journal, output: Path) -> None:
        self.folder = folder
        """`run.dir`."""
        self.launcher = launcher
        self.journal = journal
        self._output = output

    @property
    def pids(self) -> dict[int, int]:
        """Process id of each rank in the latest attempt."""
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
            with suppress(ValueError):  # the last line may be incomplete
                found.append(json.loads(line))
        return found

    @property
    def step(self) -> int:
        """The last step in metrics.jsonl, or 0."""
        return max((record["step"] for record in self.metrics if isinstance(record, dict)), default=0)

    @property
    def checkpoints(self) -> list[int]:
        """The steps of complete checkpoints."""
        return sorted(int(each.name) for each in (self.folder / "checkpoints").glob("*") if each.name.isdecimal())

    def log(self, rank: int) -> str:
        """Returns the output of a rank in all attempts."""
        path = self.folder / "logs" / f"rank-{rank}.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def output(self) -> tuple[str, str]:
        """Returns the launcher's stdout and stderr so far."""
        out, err = (self._output / name for name in ("stdout", "stderr"))
        return out.read_text(encoding="utf-8", errors="replace"), err.read_text(encoding="utf-8", errors="replace")

    def wait_until(self, what: Callable[[], Any], seconds: float = 120) -> None:
        """Waits until `what` returns true; raises TimeoutError with the output otherwise."""
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
        """Waits until a step is in metrics.jsonl."""
        self.wait_until(lambda: self.step >= number, seconds)

    def wait(self, seconds: float = 240) -> Ended:
        """Waits for the end of the run; kills it and raises TimeoutError if it does not end."""
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
        """Kills the launcher, whose guard kills every process that it started."""
        pids = self.pids
        with suppress(ProcessLookupError):
            self.launcher.kill()
        self.launcher.wait()
        assert_gone(*pids.values())


@contextmanager
def cluster(
    config: str | Path,
    *,
    processes: int,
    devices: int,
    faults: Sequence[Fault] = (),
    overrides: Sequence[str] = (),
    restarts: int = 0,
    environment: Mapping[str, str] | None = None,
    journal: Path | None = None,
) -> Iterator[Cluster]:
    """Starts a run in several processes of this machine, as `--on local:PxD` does, and kills it at the end.

    Faults are injected once over all attempts; pass the journal of an earlier run to continue it.
    """
    run_dir = Path(load_config(str(config), overrides, num_processes=processes, simulate=devices).run.dir).absolute()
    words = ["launch", str(config), *overrides, "--on", f"local:{processes}x{devices}", "--restarts", str(restarts)]
    with tempfile.TemporaryDirectory(prefix="spmdkit-cluster-") as name:
        output, notes = Path(name), journal or Path(name) / "journal.jsonl"
        variables = {VARIABLE: to_json(faults), JOURNAL: str(notes), "PYTHONPATH": str(TESTS)}
        with (output / "stdout").open("wb") as out, (output / "stderr").open("wb") as err:
            launcher = subprocess.Popen(
                [sys.executable, "-P", "-m", "support.fault_worker", *words],
                env={**(os.environ if environment is None else environment), **variables},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        run = Cluster(run_dir, launcher, Journal(notes), output)
        try:
            yield run
        finally:
            run.end()
