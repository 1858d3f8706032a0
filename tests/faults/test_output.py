"""Output that nobody takes, that has no end, or that is no text: the run goes on, and the machine bears it."""

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.processes import wait_for, wait_until_none_of
from support.runs import command, environment, losses, source_module, write_config

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.multiprocess]
STEPS = 12
LOUD = source_module(
    """
    import os, sys

    TEXT = os.environ.get("LOUD", "loud ").encode().decode("unicode_escape")
    TIMES = int(os.environ.get("LOUD_TIMES", "1"))
    """,
    take="""
    sys.stdout.write(TEXT * TIMES + "\\n")
    sys.stdout.flush()
    """,
)
"""A source of data that prints before each batch."""


@pytest.fixture
def config(tmp_path) -> Path:
    (tmp_path / "loud.py").write_text(LOUD)
    return write_config(tmp_path, data={"source": "loud:rows"}, eval={"every": 0, "batches": 1})


def launch(config: Path) -> list[str]:
    return command("launch", config, "--on", "local:2x4")


def shell(line: str, config: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a line of bash in which "$@" launches the run."""
    words = ["bash", "-c", f"set -o pipefail; {line}", "bash", *launch(config)]
    return subprocess.run(words, env=environment(**variables), capture_output=True, text=True, timeout=280)


def assert_whole(config: Path) -> None:
    assert list(losses(config.parent / "run")) == list(range(1, STEPS + 1))
    assert (config.parent / "run" / "report.html").exists()
    assert wait_until_none_of(config.parent) == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('"$@" | head -2', ""),
        ('"$@" > /dev/full', "warning: the standard output: No space left on device; nothing more is printed there"),
        ('"$@" > /dev/full 2>&1', ""),
        ('setsid -w nohup "$@" | cat', ""),
    ],
)
def test_survives_blocked_output(line, said, config):
    ended = shell(line, config)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count(said or "warning: ") == (1 if said else 0)
    assert "Traceback" not in ended.stderr
    assert_whole(config)


# On a terminal


def on_a_terminal(words: list[str], **variables: str) -> tuple[subprocess.Popen[bytes], int]:
    """Starts a command on a terminal of its own; gives its process and the other end."""
    master, slave = pty.openpty()
    env, streams = environment(TERM="xterm", **variables), dict.fromkeys(("stdin", "stdout", "stderr"), slave)
    process = subprocess.Popen(["setsid", "--ctty", *words], env=env, **streams)
    os.close(slave)
    return process, master


def read_all(master: int, seconds: float = 240) -> bytes:
    found, deadline = b"", time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not select.select([master], [], [], 1)[0]:
            continue
        try:
            data = os.read(master, 65536)
        except OSError:  # the last process has closed it
            return found
        if not data:
            return found
        found += data
    raise AssertionError(f"no end after {seconds} s: {found[-2000:]!r}")


def test_escapes_control_characters_of_workers(config):
    words = "\\x1b[2J\\x1b]0;title\\x07\\x1b[31mred\\x1b[0m\\x00\\x9b2J"
    process, master = on_a_terminal(launch(config), LOUD=words)
    shown = read_all(master).decode()
    os.close(master)
    assert process.wait(timeout=60) == 0, shown
    assert "\\x1b[2J\\x1b]0;title\\x07\x1b[31mred\x1b[0m" in shown
    rest = re.sub(r"\x1b\[[0-9;:]*m", "", shown)
    assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", rest)
    assert words.encode().decode("unicode_escape").encode() in (config.parent / "run/logs/rank-0.log").read_bytes()


@pytest.mark.parametrize("nohup", [False, True])
def test_survives_closed_terminal(nohup, tmp_path):
    options = {"checkpoint": {"every": 0}, "eval": {"every": 0, "batches": 1}}
    config = write_config(tmp_path, train={"steps": 400, "global_batch": 16}, **options)
    words = launch(config)
    # nohup would send the output to a file where it is a terminal
    words = ["bash", "-c", "trap '' HUP; exec \"$@\"", "bash", *words] if nohup else words
    process, master = on_a_terminal(words)
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") > 5)
    os.close(master)
    code = process.wait(timeout=240)
    log = (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    assert code == (0 if nohup else 75), log
    assert ("Stopped by SIGHUP to rank" in log) is not nohup
    steps = [int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert steps == [400] if nohup else 5 < steps[0] < 400
    assert wait_until_none_of(config.parent) == []


# Much of it

FLOOD = """
import json, os, sys, time
from pathlib import Path
from spmdkit.launch.supervision.workers import run_processes
from spmdkit.launch.supervision.workers import Start
program = '''
import os
data = (b"x" * 99 + b"\\\\n") * 10000 if %(lines)r else os.urandom(1_000_000).replace(b"\\\\n", b" ")
for _ in range(%(megabytes)d):
    left = memoryview(data)
    while left:
        left = left[os.write(1, left):]
'''
Path("/proc/self/clear_refs").write_text("5")  # a child begins with its parent's peak
begin = time.monotonic()
outcome = run_processes([Start([sys.executable, "-c", program], dict(os.environ))], Path(sys.argv[1]))
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
peak = int(status["VmHWM"].split()[0])
print(json.dumps([outcome.exit_code, peak, time.monotonic() - begin]), file=sys.stderr)
"""


@pytest.mark.parametrize("lines", [True, False], ids=["lines", "one endless binary line"])
def test_limits_memory_for_flood_of_output(lines, tmp_path):
    megabytes = 200
    code = FLOOD % {"lines": lines, "megabytes": megabytes}
    with (tmp_path / "shown").open("wb") as shown:
        ended = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], stdout=shown, stderr=subprocess.PIPE, text=True, timeout=280
        )
    exit_code, peak, seconds = json.loads(ended.stderr.splitlines()[-1])
    assert exit_code == 0
    assert peak < 250_000, f"{peak} KiB"  # Python and its modules are 30,000 of them
    assert (tmp_path / "rank-0.log").stat().st_size > megabytes * 10**6
    print(f"{megabytes / seconds:.0f} MB/s")
    assert megabytes / seconds > 1000 / 60, "1 GB in a minute"
