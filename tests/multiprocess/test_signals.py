"""A signal ends a run between two steps, saved at one step in all processes; it goes on as if nothing had been."""

import signal
import subprocess

import pytest
from support.processes import begin, start, wait, wait_for_step
from support.runs import assert_same_arrays, command, losses, state_arrays, trained, write_config

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]
STEPS = 400
LOGGED = {"run": {"simulate": 8, "log_every": 1}, "train": {"steps": STEPS, "global_batch": 16}}
OPTIONS = {**LOGGED, "checkpoint": {"every": 0}, "eval": {"every": 0, "batches": 2}}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    config = write_config(tmp_path_factory.mktemp("undisturbed"), **OPTIONS)
    trained("train", config)
    return config


def started(config) -> subprocess.Popen[str]:
    return begin(command("train", config), stderr=subprocess.STDOUT)


def saved_step(folder) -> int:
    (step,) = (int(path.name) for path in (folder / "run" / "checkpoints").iterdir() if path.name.isdecimal())
    assert 0 < step < STEPS
    return step


@pytest.mark.long
def test_signal_to_one_process_saves(undisturbed, tmp_path):
    config = write_config(tmp_path, **OPTIONS)
    process = started(config)
    wait_for_step(tmp_path, 5, process)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 75, printed
    step = saved_step(tmp_path)
    assert f"Stopped by SIGTERM after step {step} of {STEPS}; saved." in printed
    ended = trained("train", config)
    assert f"at step {step} of {STEPS}" in ended.stdout
    assert losses(config.parent / "run") == losses(undisturbed.parent / "run")
    assert_same_arrays(state_arrays(config, STEPS), state_arrays(undisturbed, STEPS))


@pytest.mark.long
def test_signal_to_one_of_two_saves(undisturbed, tmp_path):
    config = write_config(tmp_path, **OPTIONS)
    processes = start(config, [[], []])
    wait_for_step(tmp_path, 5, processes[0])
    processes[0].terminate()
    ended = wait(processes, 60)
    assert [each.code for each in ended] == [75, 75], [each.stderr for each in ended]
    step = saved_step(tmp_path)
    assert f"Stopped by SIGTERM to rank 0 after step {step} of {STEPS}; saved." in ended[0].stdout
    trained("train", config)  # goes on in one process, which adds up in another order than two
    expected = losses(undisturbed.parent / "run")
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-4)


@pytest.mark.long
def test_signal_during_compilation_writes_nothing(tmp_path):
    """There is nothing to save, and the run directory is as free as before."""
    config = write_config(tmp_path, **OPTIONS)
    process = started(config)
    for line in process.stdout or ():
        if "mlp, 2,410 parameters" in line:
            process.send_signal(signal.SIGTERM)
            break
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 75, printed
    assert "Stopped by SIGTERM after step 0" in printed
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert not (tmp_path / "run" / "owner.json").exists()
