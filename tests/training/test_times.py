"""Seconds by kind add up to the elapsed time."""

import subprocess
import sys
import time

import pytest
from spmdkit.training.times import Times, process_age


def test_every_second_has_one_kind():
    begin = time.monotonic()
    times = Times("start", begin - 5)
    times.switch("data")
    time.sleep(0.02)
    times.switch("step")
    times.switch("data")
    first = times.take()
    time.sleep(0.02)
    second = times.take()
    passed = time.monotonic() - begin
    assert first.keys() == {"start", "data", "step"}
    assert second.keys() == {"data"}
    assert 5 <= first["start"] < 5.1
    assert first["data"] >= 0.02 <= second["data"]
    assert sum(first.values()) + sum(second.values()) == pytest.approx(passed + 5, abs=0.005)


def test_process_age_is_the_time_since_its_start():
    program = "import time; from spmdkit.training.times import process_age; time.sleep(0.2); print(process_age())"
    begin = time.monotonic()
    age = float(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)
    assert 0.2 <= age <= time.monotonic() - begin + 0.05
    assert process_age() > 0
