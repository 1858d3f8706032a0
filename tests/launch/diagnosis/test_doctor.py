"""The whole command, in one process and in several."""

import json

import pytest
from ranks import start_each, wait
from runs import write_config
from spmdkit.launch.cli import main


@pytest.fixture
def config(tmp_path):
    return write_config(tmp_path)


def test_nothing_is_wrong(config, capsys):
    assert main(["doctor", str(config)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("spmdkit doctor\n")
    assert "ok    job           one process: no variable says that there are others" in printed
    assert "8 simulated CPU devices in each process" in printed
    assert printed.endswith("Nothing is wrong.\n")
    assert not (config.parent / "run").exists()


def test_as_json(config, capsys):
    assert main(["doctor", "--json", str(config)]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["ok"]
    assert {"job", "versions", "devices", "cores", "run.dir"} <= {finding["name"] for finding in values["findings"]}


@pytest.mark.parametrize(
    ("arguments", "variables", "name", "found"),
    [
        (["train.stps=3"], {}, "config", "train.stps is not a key"),
        ([], {"SPMDKIT_PROCESS_ID": "1"}, "job", "SPMDKIT_PROCESS_ID says that this is process 1, but nothing says"),
        ([], {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2"}, "job", "this is the batch script itself"),
        (["run.dir=/proc/nothing"], {}, "run.dir", "/proc/nothing"),
    ],
)
def test_what_is_wrong(arguments, variables, name, found, config, capsys, monkeypatch):
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert main(["doctor", str(config), "--json", *arguments, "run.simulate=8"]) == 2
    values = json.loads(capsys.readouterr().out)
    assert not values["ok"]
    assert any(
        each["name"] == name and each["level"] == "wrong" and found in each["found"] for each in values["findings"]
    )


def test_a_wait_that_is_none(capsys):
    assert main(["doctor", "--wait", "-1"]) == 2
    assert "--wait -1: give more than 0 seconds" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_together(config):
    ended = wait(start_each([("doctor", config)] * 2))
    assert [each.code for each in ended] == [0, 0], ended
    printed = ended[0].stdout
    assert printed.startswith("spmdkit doctor of 2 processes\n")
    assert "rank 1: process 1 of 2 (SPMDKIT_PROCESS_ID, SPMDKIT_NUM_PROCESSES)" in printed
    assert "all 2 have met: 2 on" in printed
    assert "all 2 processes see the same" in printed
    assert ended[1].stdout == ""
    assert not (config.parent / "run").exists()
