"""The tools of this directory: faults, their effects, the journal, damaged checkpoints, `same_run` and the soak."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from spmdkit.launch.cli import main
from support.cluster import cluster
from support.faults import (
    Fault,
    InjectedFault,
    Injector,
    Journal,
    Moment,
    damage,
    from_json,
    latest_checkpoint,
    to_json,
)
from support.runs import environment, same_run, write_config
from support.soak import plan, recoveries

TESTS = str(Path(__file__).parents[1])


def test_faults_round_trip_through_the_environment():
    faults = (
        Fault(kind="kill", rank=1, step=7),
        Fault(kind="signal", phase="data", signals=("SIGTERM", "SIGKILL"), seconds=0.5, rank=None),
        Fault(kind="raise", phase="read", error="EIO", times=3),
    )
    assert from_json(to_json(faults)) == faults
    assert to_json(faults[:1]) == '[{"kind": "kill", "rank": 1, "step": 7}]'
    assert from_json("") == ()
    for mistake in ({"kind": "explode"}, {"kind": "kill", "phase": "lunch"}, {"kind": "flip", "phase": "save"}):
        with pytest.raises(ValueError, match=r"unknown kind|only"):
            from_json(json.dumps([mistake]))


def injected(injector: Injector, **moment) -> bool:
    try:
        injector.at(Moment(**moment))
    except InjectedFault:
        return True
    return False


def test_injects_a_fault_at_its_moment_and_once(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    faults = [Fault(kind="raise", rank=1, step=3, phase="data")]
    injector = Injector(faults, 1, journal)
    assert not injected(injector, phase="data", step=2)
    assert not injected(injector, phase="step", step=3)
    assert not injected(Injector(faults, 0, journal), phase="data", step=3)
    assert injected(injector, phase="data", step=3)
    assert not injected(injector, phase="data", step=3)
    (event,) = journal.events("fault")
    assert (event["index"], event["kind"], event["rank"], event["step"], event["phase"]) == (0, "raise", 1, 3, "data")
    assert not injected(Injector(faults, 1, journal), phase="data", step=3), "also not in the next attempt"


@pytest.mark.parametrize(
    ("how", "left", "data"),
    [
        ("flip", 4, b"01234\x316789"),
        ("truncate", 4, b"01234"),
        ("remove", 2, None),
        ("metadata", 2, b"0123456789"),
        ("empty", 0, None),
    ],
)
def test_damages_the_latest_checkpoint(how, left, data, tmp_path):
    directory = tmp_path / "checkpoints" / "12"
    for name in ("state/d/one", "state/ocdbt.process_0/d/two", "_CHECKPOINT_METADATA", "state/_METADATA"):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(b"0123456789")
    (tmp_path / "checkpoints" / "8").mkdir()
    (tmp_path / "checkpoints" / "removed-16").mkdir()
    assert latest_checkpoint(directory.parent) == directory
    damage(directory, how)
    files = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}
    assert len(files) == left
    assert (files["state/d/one"].read_bytes() if "state/d/one" in files else None) == data


OPTIONS = {"steps": 200, "processes": 2, "every": 4.0, "save_every": 5, "eval_every": 10}


def test_plans_are_deterministic_and_contain_every_kind():
    assert plan(3, **OPTIONS) == plan(3, **OPTIONS) != plan(4, **OPTIONS)
    faults = plan(0, **OPTIONS)
    assert {fault.rank for fault in faults} == {0, 1}
    assert {fault.kind for fault in faults} >= {"kill", "hang", "damage", "nan", "raise", "stop", "signal"}
    assert all(fault.step % 5 == 0 for fault in faults if fault.phase.startswith("save"))
    damaged = [fault.step for fault in faults if fault.kind == "damage"]
    assert min(damaged) > 3 * OPTIONS["save_every"], "the second save may still be running"


EVENTS = [
    {"event": "training", "time": 5, "rank": 0, "step": 1},
    {"event": "fault", "time": 10, "index": 0, "kind": "kill", "rank": 1, "step": 7, "phase": "step"},
    {"event": "ended", "time": 11.5, "cause": [1, "killed by SIGKILL", 75, 1], "code": 75, "exits": []},
    {"event": "attempt", "time": 12},
    {"event": "training", "time": 16, "rank": 0, "step": 5},
    {"event": "fault", "time": 18, "index": 1, "kind": "pause", "rank": 0, "step": 9, "phase": "step"},
    {"event": "ended", "time": 40, "cause": None, "code": 0, "exits": []},
]


def test_outcomes_are_read_from_the_journal(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in EVENTS))
    killed, paused = recoveries(Journal(path))
    assert killed[:4] == ("kill", 1.5, 6, 2)
    assert str(paused) == "pause: continued"


@pytest.mark.slow
def test_same_run_finds_differences(tmp_path):
    config = write_config(tmp_path, train={"steps": 3, "global_batch": 16})
    run, other = tmp_path / "run", tmp_path / "other"
    assert main(["train", str(config)]) == 0
    assert main(["train", str(config), f"run.dir={other}", "run.seed=1"]) == 0
    problems = same_run(other, run)
    assert problems[0].startswith("step 1: ")
    assert any("other bits" in problem for problem in problems)
    shutil.copytree(run, tmp_path / "copy")
    assert same_run(tmp_path / "copy", run) == []
    path = tmp_path / "copy" / "metrics.jsonl"
    kept = [line for line in path.read_text().splitlines() if json.loads(line)["step"] != 2]
    path.write_text("\n".join(kept) + "\n")
    (problem,) = same_run(tmp_path / "copy", run)
    assert problem.startswith("step 2: None and ")


LONG = {"train": {"steps": 100_000, "global_batch": 16}, "checkpoint": {"every": 0}}
TWO = {"strategy": {"fsdp": {"size": 2, "floor_bytes": 256}, "data": 2}, "run": {"log_every": 1}}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.faults
def test_cluster_watches_a_run_and_kills_its_processes(tmp_path):
    config = write_config(tmp_path, **TWO, **LONG)
    with cluster(config, processes=2, devices=2, environment=environment()) as run:
        run.wait_for_step(3)
        pids = run.pids
        assert sorted(pids) == [0, 1]
        assert all(map(alive, pids.values()))
        assert run.metrics[0]["step"] == 1
        assert "process" in run.log(1)
        begin = time.monotonic()
        os.kill(pids[1], signal.SIGSTOP)
        with pytest.raises(TimeoutError, match="did not end within 1 s"):
            run.wait(1)
        assert time.monotonic() - begin < 20
        with pytest.raises(TimeoutError, match="the run has ended"):
            run.wait_for_step(10**6)
    assert not any(map(alive, pids.values())), "also the stopped one"
