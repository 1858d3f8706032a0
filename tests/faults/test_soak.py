"""A soak of four processes: random faults for some minutes, and in the end the bits of the undisturbed run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.runs import environment, write_config

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, pytest.mark.faults]
MINUTES, SECONDS = 1, 840
"""Faults are injected for so long; both runs together may take so long."""


@pytest.mark.timeout(SECONDS + 30)
def test_soak_of_four_processes(tmp_path):
    options = {"checkpoint": {"every": 4}, "strategy": {"fsdp": {"size": 4, "floor_bytes": 256}}}
    config = write_config(tmp_path, train={"steps": 24, "global_batch": 16}, **options)
    words = f"--processes 4 --devices 1 --seed 3 --every 4 --deadline 20 --minutes {MINUTES}".split()
    ended = subprocess.run(
        [sys.executable, "-m", "support.soak", str(config), *words, "--folder", str(tmp_path / "soak")],
        env=environment(PYTHONPATH=str(Path(__file__).parents[1])),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "every loss and every bit of every array is that of the undisturbed run" in ended.stderr
    found = re.search(r"^(\d+) faults of (\d+) kinds$", ended.stdout, re.MULTILINE)
    assert found is not None
    assert int(found[1]) >= 2, "it was disturbed"
