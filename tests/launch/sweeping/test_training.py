"""The process that a run of a sweep is trained in; tests/multiprocess/test_sweep.py starts real ones."""

import os
import sys

import pytest
from spmdkit.launch.local import LocalTarget
from spmdkit.launch.sweeping.combinations import combine
from spmdkit.launch.sweeping.planning import Asked, SweptRun
from spmdkit.launch.sweeping.training import command, environment

SPMDKIT = [sys.executable, "-P", "-m", "spmdkit"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, ["train", "my.yaml", "a=1", "run.dir=x"]),
        ({"fresh": True}, ["train", "my.yaml", "a=1", "run.dir=x", "--fresh"]),
        ({"on": LocalTarget(2, 4)}, ["launch", "--on", "local:2x4", "my.yaml", "a=1", "run.dir=x"]),
    ],
)
def test_the_command_is_that_of_one_run(options, words):
    run = SweptRun(combination=combine(["a=1,2"])[0], overrides=("a=1", "run.dir=x"))
    assert command(Asked("my.yaml", **options), run) == [*SPMDKIT, *words]


def test_it_is_no_part_of_a_job_and_ends_with_this_process(monkeypatch):
    monkeypatch.setenv("SPMDKIT_NUM_PROCESSES", "1")
    monkeypatch.setenv("OTHER", "kept")
    found = environment()
    assert "SPMDKIT_NUM_PROCESSES" not in found
    assert found["OTHER"] == "kept"
    assert found["SPMDKIT_BOUND"] == str(os.getpid())
