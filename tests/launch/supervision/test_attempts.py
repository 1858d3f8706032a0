"""Attempts of a run, and restarts after a failure."""

import json
import os
import signal
import threading
from queue import SimpleQueue

import pytest
from spmdkit.configs.schema import Config, RunConfig
from spmdkit.launch.launchers import LaunchJob, LaunchRequest
from spmdkit.launch.supervision import attempts, workers
from spmdkit.launch.supervision.attempts import Restarts, find_latest_step, remove_created, run_attempts
from spmdkit.launch.supervision.blame import Exit, Outcome
from spmdkit.runtime import ownership


def job(folder, **request):
    return LaunchJob(LaunchRequest("config.yaml", **request), Config(run=RunConfig(dir=str(folder))))


def test_removes_only_new_logs(tmp_path):
    logs = tmp_path / "runs" / "new" / "logs"
    logs.mkdir(parents=True)
    (logs / "rank-0.log").write_text("error")
    assert not remove_created([], logs)  # they were there before
    (logs.parent / "config.yaml").write_text("")
    assert not remove_created([logs, logs.parent], logs)  # the run has started
    assert logs.is_dir()
    (logs.parent / "config.yaml").unlink()
    (tmp_path / "runs" / "other").mkdir()
    assert remove_created([logs, logs.parent, tmp_path / "runs"], logs)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["other"]


@pytest.mark.parametrize("had_run", [False, True])
def test_fresh_applies_until_the_new_run_has_the_directory(had_run, tmp_path, monkeypatch):
    folder, asked = tmp_path / "run", []
    folder.mkdir()
    if had_run:
        (folder / "checkpoints" / "4").mkdir(parents=True)
        (folder / "config.yaml").write_text("the old run")

    def run_processes(starts, logs, stop):
        if len(asked) == 2:  # the first attempt died before it took the directory
            (folder / "config.yaml").unlink(missing_ok=True)
            (folder / "config.yaml").write_text("the new run")
            (folder / "checkpoints" / "2").mkdir(parents=True, exist_ok=True)
        return Outcome((Exit(0, 75 if len(asked) < 4 else 0),), None, ([],))

    def attempt(fresh):
        asked.append(fresh)
        return attempts.Attempt((), "starting")

    monkeypatch.setattr(attempts, "run_processes", run_processes)
    monkeypatch.setattr(attempts.time, "sleep", lambda seconds: None)
    assert run_attempts(job(folder, fresh=True, restarts=5), attempt) == 0
    assert asked == [True, True, False, False]


def test_attempts_that_cannot_be_made_are_counted(tmp_path, monkeypatch, capsys):
    def attempt(fresh):
        raise attempts.NotNow("host two does not answer")

    monkeypatch.setattr(attempts.time, "sleep", lambda seconds: None)
    assert run_attempts(job(tmp_path / "run", restarts=2), attempt) == 75
    printed = capsys.readouterr().err
    assert printed.count("spmdkit launch: host two does not answer\n") == 3
    assert "not restarted: 2 restarts made no newer checkpoint" in printed
    assert not (tmp_path / "run").exists()


def test_starts_nothing_in_a_directory_in_use(tmp_path):
    parent = ownership.this_process()._replace(pid=os.getppid(), started=ownership.start_of(os.getppid()))
    (tmp_path / ownership.NAME).write_text(json.dumps(parent._asdict()))
    with pytest.raises(ownership.DirectoryInUse):
        run_attempts(job(tmp_path), lambda fresh: pytest.fail("started"))


def test_a_signal_leaves_the_time_to_save(monkeypatch):
    sent, events = [], SimpleQueue()
    monkeypatch.setattr(workers, "send", lambda _, number: sent.append(number))
    monkeypatch.setattr(workers, "read_states", lambda _: {})
    monkeypatch.setattr(workers, "GRACE_SECONDS", 0.0)
    events.put(signal.SIGTERM)
    threading.Timer(0.3, events.put, [Exit(0, 0)]).start()
    found = workers._supervise([None], events, stop=30.0)
    assert (found, sent) == (([Exit(0, 0, stopped=True)], signal.SIGTERM, {}), [signal.SIGTERM])


def test_handles_no_signal_that_nohup_ignores(tmp_path, monkeypatch):
    handled = []
    monkeypatch.setattr(signal, "getsignal", {signal.SIGHUP: signal.SIG_IGN}.get)
    monkeypatch.setattr(signal, "signal", lambda number, _: handled.append(number))
    workers.run_processes([], tmp_path)
    assert set(handled) == {*workers.SIGNALS} - {signal.SIGHUP}


def ended(code, received=None):
    return Outcome((Exit(0, code),), received, ([],))


@pytest.mark.parametrize(("code", "received"), [(0, None), (1, None), (2, None), (3, None), (75, signal.SIGTERM)])
def test_other_exit_codes_and_signals_to_the_launcher_end_the_run(code, received, tmp_path):
    assert Restarts(tmp_path, 3).decide(ended(code, received)) == (None, "")


@pytest.mark.parametrize("code", [75, -signal.SIGKILL, -signal.SIGABRT, -signal.SIGSEGV])
def test_restarts_from_the_latest_checkpoint(code, tmp_path):
    tries = Restarts(tmp_path / "checkpoints", 2)
    assert tries.decide(ended(code))[1].startswith("restarting in 1 s from the beginning, restart 1 of 2")
    for step in (5, 10, 15):  # as often as it gets further
        (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
        assert tries.decide(ended(code)) == (0, f"restarting from step {step}")


def test_gives_up_without_progress(tmp_path):
    (tmp_path / "8").mkdir()
    tries = Restarts(tmp_path, 3)
    assert [tries.decide(ended(75))[0] for _ in range(4)] == [1, 2, 4, None]
    assert Restarts(tmp_path, 0).decide(ended(75)) == (None, "")
    many = Restarts(tmp_path, 20)
    assert max(many.decide(ended(75))[0] or 0 for _ in range(20)) == 60


def test_latest_step_ignores_other_directories(tmp_path):
    for name in ("7", "damaged-9", "removed-8", "12.orbax-checkpoint-tmp"):
        (tmp_path / name).mkdir()
    assert find_latest_step(tmp_path) == 7
    assert find_latest_step(tmp_path / "none") == 0


def test_progress_after_a_corrupt_checkpoint_counts(tmp_path):
    (tmp_path / "999").mkdir()
    (tmp_path / "20").mkdir()
    tries = Restarts(tmp_path, 1)
    (tmp_path / "999").rename(tmp_path / "damaged-999")
    assert tries.decide(ended(75)) == (1, "restarting in 1 s from step 20, restart 1 of 1 without a newer checkpoint")
    (tmp_path / "40").mkdir()
    assert tries.decide(ended(75)) == (0, "restarting from step 40")
