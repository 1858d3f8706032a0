"""Phases are found where the run has them now: an undisturbed run goes through all of them, in this process.

What faults do there is in tests/faults.
"""

import subprocess
import sys

import pytest
from runs import environment, write_config

from spmdkit.testing.faults import PHASES

RECORD = """
import os
import sys
from spmdkit.testing.injector import Injector
from spmdkit.testing.journal import Journal
from spmdkit.testing.moments import install

class Recorder(Injector):
    def has(self, prefix):
        return True
    def at(self, moment):
        os.write(1, f"moment {moment.phase} {moment.step}\\n".encode())  # in one piece: several threads come here
        return moment

install(Recorder([], 0, Journal(None)))
from spmdkit.launch.cli import main
for arguments in (sys.argv[1:], [*sys.argv[1:], "train.steps=6"]):
    assert main(arguments) == 0
"""


@pytest.mark.slow
def test_an_undisturbed_run_goes_through_every_phase(tmp_path):
    config = write_config(
        tmp_path,
        train={"steps": 4, "global_batch": 16},
        checkpoint={"every": 2, "keep": 1},
        eval={"every": 2, "batches": 1},
    )
    command = [sys.executable, "-c", RECORD, "train", str(config)]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = [line.split()[1:] for line in ended.stdout.splitlines() if line.startswith("moment ")]
    assert {phase for phase, _ in found} == set(PHASES)
    steps = {phase: [step for each, step in found if each == phase] for phase in PHASES}
    assert steps["step"] == steps["batch"] == ["1", "2", "3", "4", "5", "6"]
    assert set(steps["read"]) == set(steps["step"])
    assert set(steps["evaluation"]) >= {"2", "4", "6"}
    assert steps["save"] == steps["save:folder"] == steps["save:commit"] == ["2", "4", "6"]
    assert set(steps["save:metadata"]) == set(steps["save:arrays"]) == {"2", "4", "6"}
    assert steps["save:removal"] == ["2", "4"]
    assert steps["start"] == ["None", "None"]
