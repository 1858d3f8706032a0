"""The supervision of real processes: small Python programs that end in every way a worker can."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from spmdkit.launch.supervision import workers
from spmdkit.launch.supervision.blame import Cause, Outcome
from spmdkit.launch.supervision.process_state import RUNS, STOPPED
from spmdkit.launch.supervision.workers import (
    GUARD,
    Start,
    free_port,
    read_states,
    run_processes,
    send,
)
from support.processes import assert_gone, process_state, wait_for

SLEEP = "import time; time.sleep(60)"
IGNORE_TERM = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready'); time.sleep(60)"


def run(programs: list[str], logs: Path, **options) -> Outcome:
    """Runs one program per rank; a failing one waits until the others have started."""
    command = [sys.executable, "-u", "-c", "import os; exec(os.environ['PROGRAM'])"]
    environments = [{**os.environ, "PROGRAM": program} for program in programs]
    return run_processes([Start(command, each) for each in environments], logs, **options)


def codes(outcome: Outcome) -> dict[int, int]:
    return {end.rank: end.code for end in outcome.exits}


def test_finished_run_has_no_cause(tmp_path, capsys):
    outcome = run(["print('a')", "import sys; print('b', file=sys.stderr)"], tmp_path / "logs")
    assert (outcome.exit_code, outcome.cause, codes(outcome)) == (0, None, {0: 0, 1: 0})
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("[0] a\n", "[1] b\n")
    assert outcome.tails == (["a"], ["b"])
    first, line = (tmp_path / "logs" / "rank-1.log").read_text().splitlines()
    assert re.search(rf"--- .* process \d+: {sys.executable} -u -c", first)
    assert line == "b"


@pytest.mark.parametrize("code", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(75, marks=pytest.mark.slow)])
def test_failure_stops_the_others(code, tmp_path):
    start = time.monotonic()
    outcome = run([SLEEP, f"import sys, time; time.sleep(0.3); sys.exit({code})", SLEEP], tmp_path)
    assert outcome.cause == Cause(1, f"exit code {code}", code, 1)
    assert outcome.exit_code == code
    assert codes(outcome) == {0: -signal.SIGTERM, 1: code, 2: -signal.SIGTERM}
    assert time.monotonic() - start < 5


STORY = """
import signal, sys, time

def told(*ignored):
    print("a long story", flush=True)
    sys.exit(143)

signal.signal(signal.SIGTERM, told)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_stopped_processes_are_muted(tmp_path, capsys):
    outcome = run([STORY, "import sys, time; time.sleep(2); print('mine'); sys.exit(2)"], tmp_path)
    assert codes(outcome) == {0: 143, 1: 2}
    assert sorted(capsys.readouterr().out.splitlines()) == ["[0] ready", "[1] mine"]
    assert "a long story" in (tmp_path / "rank-0.log").read_text()


@pytest.mark.slow
def test_kills_processes_that_ignore_sigterm(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "GRACE_SECONDS", 0.5)
    start = time.monotonic()
    outcome = run([IGNORE_TERM, "import time; time.sleep(1); 1 / 0"], tmp_path)
    assert codes(outcome) == {0: -signal.SIGKILL, 1: 1}
    assert outcome.tails[1][-1] == "ZeroDivisionError: division by zero"
    assert time.monotonic() - start < 5


FATAL = "import os, sys; print('JAX distributed service detected fatal errors', file=sys.stderr); os.abort()"
GLOO = "import sys; print('error: Gloo all-reduce failed: Connection closed by peer', file=sys.stderr); exit(75)"


@pytest.mark.parametrize("symptom", [FATAL, GLOO])
def test_waits_for_the_cause_of_a_symptom(symptom, tmp_path):
    outcome = run([symptom, "import time; time.sleep(0.4); exit(3)", SLEEP], tmp_path)
    assert outcome.cause == Cause(1, "exit code 3", 3, 1)


@pytest.mark.slow
def test_others_may_finish_later(tmp_path, monkeypatch):
    assert run(["pass", "import time; time.sleep(1)"], tmp_path).cause is None
    monkeypatch.setattr(workers, "LEAVE_SECONDS", 0.5)
    start = time.monotonic()
    outcome = run(["pass", SLEEP], tmp_path)
    assert outcome.cause == Cause(0, "ended with code 0 before the others finished", 75, 0)
    assert codes(outcome) == {0: 0, 1: -signal.SIGTERM}
    assert time.monotonic() - start < 10


@pytest.mark.slow
def test_halted_process_is_the_cause(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "GRACE_SECONDS", 0.5)
    stop = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    outcome = run([stop, GLOO.replace("import sys", "import sys, time; time.sleep(1)")], tmp_path)
    assert outcome.states == {0: STOPPED}
    assert outcome.cause is not None
    assert (outcome.cause.rank, outcome.cause.exit_code) == (0, 75)


def test_kills_children_of_workers(tmp_path):
    child = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {SLEEP!r}]); print(p.pid)"
    outcome = run([child], tmp_path)
    assert outcome.exit_code == 0
    assert_gone(int(outcome.tails[0][0]))


LAUNCHER = f"""
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # it is ignored, and stays so, where the tests run under nohup
from pathlib import Path
from spmdkit.launch.supervision.workers import run_processes
from spmdkit.launch.supervision.workers import Start
program = {IGNORE_TERM!r}.replace("'ready'", "os.getpid()").replace("import signal", "import os, signal")
command = [sys.executable, "-u", "-c", program]
outcome = run_processes([Start(command, dict(os.environ))] * 2, Path(sys.argv[1]), stop=float(sys.argv[2]))
sys.exit(outcome.exit_code)
"""


@pytest.fixture
def launched(tmp_path, request):
    """A launcher of two workers that ignore SIGTERM, and their process ids; the parameter is the time to stop."""
    command = [sys.executable, "-u", "-c", LAUNCHER, str(tmp_path), str(getattr(request, "param", 3))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        yield launcher, [int(launcher.stdout.readline().split()[1]) for _ in range(2)]
        launcher.kill()


@pytest.mark.long_cases("15")
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_to_the_launcher_ends_all(number, launched):
    launcher, workers = launched
    start = time.monotonic()
    launcher.send_signal(number)
    assert launcher.wait(timeout=10) == 75
    launcher.communicate()
    assert time.monotonic() - start < 6
    assert_gone(*workers, seconds=1)


@pytest.mark.slow
@pytest.mark.parametrize("launched", [60], indirect=True)
def test_second_signal_ends_all_at_once(launched):
    launcher, workers = launched
    launcher.terminate()
    time.sleep(0.2)
    launcher.terminate()
    assert launcher.wait(timeout=30) == 75
    launcher.communicate()
    assert_gone(*workers, seconds=1)


@pytest.mark.slow
def test_no_orphans_when_the_launcher_is_killed(launched):
    launcher, workers = launched
    assert all(map(process_state, workers))
    launcher.kill()
    launcher.wait(timeout=10)
    launcher.communicate()
    assert_gone(*workers)


def test_sends_signals_and_finds_stopped_ranks():
    processes = [subprocess.Popen([sys.executable, "-c", SLEEP], process_group=0) for _ in range(2)]
    same: Any = {"signals": {signal.SIGUSR1: 9}, "is_rank": True}
    workers: Any = [SimpleNamespace(rank=rank, process=process, **same) for rank, process in enumerate(processes)]
    assert read_states(workers) == {0: RUNS, 1: RUNS}
    send(workers[1:], signal.SIGSTOP)
    wait_for(lambda: read_states(workers) == {0: RUNS, 1: STOPPED})
    send(workers, signal.SIGUSR1)
    assert [process.wait(timeout=10) for process in processes] == [-signal.SIGKILL] * 2, "the signal is replaced"
    send(workers, signal.SIGKILL)  # to nobody


pytestmark = pytest.mark.multiprocess


def test_guard_kills_every_group_when_its_pipe_closes():
    sleepers = [subprocess.Popen([sys.executable, "-c", SLEEP], process_group=0) for _ in range(2)]
    gone = subprocess.Popen([sys.executable, "-c", ""], process_group=0)
    gone.wait()
    groups = "".join(f"{process.pid}\n" for process in (sleepers[0], gone, sleepers[1]))
    subprocess.run([sys.executable, "-c", GUARD], input=groups, text=True, check=True, timeout=20)
    assert [process.wait(timeout=5) for process in sleepers] == [-signal.SIGKILL] * 2


def test_ports_differ_while_taken():
    with socket.socket() as server:
        server.bind(("", free_port()))
        server.listen()
        assert free_port() != server.getsockname()[1]
