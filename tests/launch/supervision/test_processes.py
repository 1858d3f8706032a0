"""The launcher against real processes: small Python programs that end in every way a worker can."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from spmdkit.launch.supervision.blame import Cause
from spmdkit.launch.supervision.processes import Outcome, run_processes
from spmdkit.launch.supervision.workers import Start

SLEEP = "import time; time.sleep(60)"
IGNORE_TERM = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready'); time.sleep(60)"


def run(programs: list[str], logs: Path, **options) -> Outcome:
    """Runs one program per rank; a failing one waits until the others have started."""
    command = [sys.executable, "-u", "-c", "import os; exec(os.environ['PROGRAM'])"]
    environments = [{**os.environ, "PROGRAM": program} for program in programs]
    return run_processes([Start(command, each) for each in environments], logs, **options)


def codes(outcome: Outcome) -> dict[int, int]:
    return {end.rank: end.code for end in outcome.exits}


def test_all_finish(tmp_path, capsys):
    outcome = run(["print('a')", "import sys; print('b', file=sys.stderr)"], tmp_path / "logs")
    assert (outcome.exit_code, outcome.cause, codes(outcome)) == (0, None, {0: 0, 1: 0})
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("[0] a\n", "[1] b\n")


def test_output_is_kept_per_rank_and_attempt(tmp_path):
    for _ in range(2):
        run(["print('first')", "print('second')"], tmp_path)
    lines = (tmp_path / "rank-1.log").read_text().splitlines()
    assert [line for line in lines if not line.startswith("--- ")] == ["second", "second"]
    assert len(lines) == 4


@pytest.mark.parametrize("code", [1, 2, 3, 75])
def test_failure_stops_the_others_with_its_own_code(code, tmp_path):
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
def test_those_that_are_told_to_end_say_nothing_on_the_terminal(tmp_path, capsys):
    """It would bury what the one said that failed; their logs have it."""
    outcome = run([STORY, "import sys, time; time.sleep(2); print('mine'); sys.exit(2)"], tmp_path)
    assert codes(outcome) == {0: 143, 1: 2}
    assert sorted(capsys.readouterr().out.splitlines()) == ["[0] ready", "[1] mine"]
    assert "a long story" in (tmp_path / "rank-0.log").read_text()


@pytest.mark.slow
def test_what_ignores_sigterm_is_killed(tmp_path):
    start = time.monotonic()
    outcome = run([IGNORE_TERM, "import time; time.sleep(1); 1 / 0"], tmp_path, grace=0.5)
    assert codes(outcome) == {0: -signal.SIGKILL, 1: 1}
    assert outcome.tails[1][-1] == "ZeroDivisionError: division by zero"
    assert time.monotonic() - start < 5


@pytest.mark.slow
def test_what_is_stopped_by_the_kernel_is_killed(tmp_path):
    stop = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    outcome = run([stop, "import time; time.sleep(0.5); exit(1)"], tmp_path, grace=0.5)
    assert codes(outcome)[0] == -signal.SIGKILL


def test_death_by_a_signal_means_try_again(tmp_path):
    outcome = run([SLEEP, "import os, time; time.sleep(0.3); os.kill(os.getpid(), 9)"], tmp_path)
    assert outcome.cause == Cause(1, "killed by SIGKILL", 75, 1)
    assert outcome.exit_code == 75


FATAL = "import os, sys; print('JAX distributed service detected fatal errors', file=sys.stderr); os.abort()"
GLOO = "import sys; print('error: Gloo all-reduce failed: Connection closed by peer', file=sys.stderr); exit(75)"


@pytest.mark.parametrize("symptom", [FATAL, GLOO])
def test_a_symptom_is_not_the_cause_if_another_exit_explains_it(symptom, tmp_path):
    outcome = run([symptom, "import time; time.sleep(0.4); exit(3)", SLEEP], tmp_path)
    assert outcome.cause == Cause(1, "exit code 3", 3, 1)


@pytest.mark.slow
def test_symptoms_alone_are_blamed_on_the_first(tmp_path):
    outcome = run([FATAL, SLEEP], tmp_path)
    assert outcome.cause == Cause(0, "killed by SIGABRT, because it lost the others", 75, 0)


def test_an_abort_is_a_cause(tmp_path):
    outcome = run(["import os; os.abort()", "import time; time.sleep(0.4); exit(1)"], tmp_path)
    assert outcome.cause == Cause(0, "killed by SIGABRT", 75, 0)


def test_one_that_finished_before_the_others_is_named(tmp_path):
    outcome = run(["pass", GLOO.replace("import sys", "import sys, time; time.sleep(1)")], tmp_path)
    assert outcome.cause == Cause(0, "ended with code 0 before the others were done", 75, 0)


@pytest.mark.slow
def test_the_others_have_some_time_once_one_has_finished(tmp_path):
    start = time.monotonic()
    outcome = run(["pass", SLEEP], tmp_path, leave=0.5)
    assert outcome.cause == Cause(0, "ended with code 0 before the others were done", 75, 0)
    assert codes(outcome) == {0: 0, 1: -signal.SIGTERM}
    assert time.monotonic() - start < 10
    assert run(["pass", "import time; time.sleep(1)"], tmp_path, leave=20).cause is None


@pytest.mark.slow
def test_one_that_is_stopped_is_named(tmp_path):
    stop = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    outcome = run([stop, GLOO.replace("import sys", "import sys, time; time.sleep(1)")], tmp_path, grace=0.5)
    assert outcome.halted == (0,)
    assert outcome.cause is not None
    assert (outcome.cause.rank, outcome.cause.exit_code) == (0, 75)


def test_children_of_workers_are_gone_too(tmp_path):
    child = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {SLEEP!r}]); print(p.pid)"
    outcome = run([child], tmp_path)
    assert outcome.exit_code == 0
    assert wait_until_gone([int(outcome.tails[0][0])])


LAUNCHER = f"""
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # it is ignored, and stays so, where the tests run under nohup
from pathlib import Path
from spmdkit.launch.supervision.processes import run_processes
from spmdkit.launch.supervision.workers import Start
program = {IGNORE_TERM!r}.replace("'ready'", "os.getpid()").replace("import signal", "import os, signal")
command = [sys.executable, "-u", "-c", program]
outcome = run_processes([Start(command, dict(os.environ))] * 2, Path(sys.argv[1]), grace=1.0)
sys.exit(outcome.exit_code)
"""


@pytest.fixture
def launched(tmp_path):
    """A launcher of two workers that ignore SIGTERM, and their process ids."""
    command = [sys.executable, "-u", "-c", LAUNCHER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        yield launcher, [int(launcher.stdout.readline().split()[1]) for _ in range(2)]
        launcher.kill()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids: list[int], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, pids))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_launcher_ends_all(number, launched):
    launcher, workers = launched
    start = time.monotonic()
    launcher.send_signal(number)
    assert launcher.wait(timeout=10) == 75
    launcher.communicate()
    assert time.monotonic() - start < 6
    assert not any(map(alive, workers))


@pytest.mark.slow
def test_a_second_signal_ends_all_at_once(launched):
    launcher, workers = launched
    launcher.terminate()
    time.sleep(0.2)
    start = time.monotonic()
    launcher.terminate()
    assert launcher.wait(timeout=10) == 75
    launcher.communicate()
    assert time.monotonic() - start < 2.5  # of the 3 seconds that it has to stop
    assert not any(map(alive, workers))


def test_no_orphans_when_the_launcher_is_killed(launched):
    launcher, workers = launched
    assert all(map(alive, workers))
    launcher.kill()
    launcher.wait(timeout=10)
    launcher.communicate()
    assert wait_until_gone(workers)
