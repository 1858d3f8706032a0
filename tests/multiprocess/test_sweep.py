"""A sweep of real processes: killed, it goes on; strategies give the same losses; one that fails stops no other."""

import json
import os
import signal
import subprocess
import time

import pytest
from runs import command, environment, listing, losses, spmdkit, write_config

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]
STEPS = 400
OPTIONS = {
    "train": {"steps": STEPS, "global_batch": 16},
    "checkpoint": {"every": 50},
    "eval": {"every": 0, "batches": 2},
}
STRATEGIES = "strategy={data: 8},{fsdp: {size: 8, floor_bytes: 256}}"
DATA, FSDP = "strategy=data-8", "strategy=fsdp-size-8-floor_bytes-256"


def started(*words):
    return subprocess.Popen(
        command("sweep", *words), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_step(folder, number, process, seconds=200):
    """Waits until a step of a run is in its log."""
    deadline, path = time.monotonic() + seconds, folder / "metrics.jsonl"
    while not path.exists() or len(path.read_text().splitlines()) < number:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"step {number} did not come"
        time.sleep(0.02)


def wait_for_end(pid, seconds=20):
    """Waits until a process is gone; one that nobody has waited for is."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return
        except OSError:
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} lives on")


def test_killed_it_goes_on_and_strategies_give_the_same_losses(tmp_path):
    config = write_config(tmp_path, **OPTIONS)
    first, second = (tmp_path / "run" / name for name in (DATA, FSDP))
    sweep = started(config, STRATEGIES)
    wait_for_step(second, 60, sweep)
    while not any(path.name.isdecimal() for path in (second / "checkpoints").iterdir()):
        assert sweep.poll() is None
        time.sleep(0.02)
    trainer = json.loads((second / "owner.json").read_text())["pid"]
    sweep.kill()
    sweep.communicate(timeout=60)
    wait_for_end(trainer)
    assert len(losses(second)) < STEPS
    done = listing(first)

    ended = spmdkit("sweep", config, STRATEGIES, "--json")
    assert ended.returncode == 0, ended.stderr
    assert listing(first) == done, "a finished run is not trained again"
    assert f"Resuming {second} at step " in ended.stderr
    found = json.loads(ended.stdout)
    assert found == json.loads((tmp_path / "run" / "sweep.json").read_text())
    one, other = found["runs"]
    assert [(each["name"], each["status"], each["step"]) for each in (one, other)] == [
        (DATA, "finished", STEPS),
        (FSDP, "finished", STEPS),
    ]
    assert other["loss"] == pytest.approx(one["loss"], rel=1e-4)
    assert other["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-4)
    assert losses(second) == pytest.approx(losses(first), rel=1e-4)
    assert one["collective_bytes"] != other["collective_bytes"]
    assert "2 runs compared" in (tmp_path / "run" / "sweep.html").read_text(encoding="utf-8")


def test_one_that_fails_stops_no_other(tmp_path):
    """The first diverges at once; the second is trained by two processes as well."""
    train = {"steps": 4, "global_batch": 16}
    config = write_config(tmp_path, train=train, eval={"every": 0, "batches": 1}, optimizer={"name": "sgd"})
    ended = spmdkit("sweep", config, "optimizer.learning_rate=1e38,0.01", "--on", "local:2x4")
    assert ended.returncode == 3, ended.stderr
    lines = ended.stdout.splitlines()
    assert [line.split()[:3] for line in lines[1:3]] == [
        ["learning_rate=1e38", "failed", lines[1].split()[2]],
        ["learning_rate=0.01", "finished", "4"],
    ]
    assert lines[3].startswith("learning_rate=1e38: exit code 3, error: ")


@pytest.mark.faults
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_saves_and_the_same_command_goes_on(name, tmp_path):
    config = write_config(tmp_path, **OPTIONS)
    folder = tmp_path / "run" / DATA
    sweep = started(config, STRATEGIES)
    wait_for_step(folder, 60, sweep)
    os.kill(sweep.pid, getattr(signal, name))
    out, err = sweep.communicate(timeout=60)
    assert sweep.returncode == 75, err
    assert f"Stopped by {name} after step " in err
    assert f"spmdkit sweep: stopped by {name}; the same command goes on" in err
    assert [line.split()[:2] for line in out.splitlines()[1:3]] == [
        [DATA, "stopped"],
        [FSDP, "waiting"],
    ]
    assert not (tmp_path / "run" / FSDP).exists()
