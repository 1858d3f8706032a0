from types import SimpleNamespace

import pytest
from spmdkit.launch.supervision import attempts
from spmdkit.launch.supervision.attempts import Attempt, remove_new, run_attempts
from spmdkit.launch.supervision.blame import Exit
from spmdkit.launch.supervision.processes import Outcome


def test_the_logs_of_a_mistake_are_removed_and_no_others(tmp_path):
    logs = tmp_path / "runs" / "new" / "logs"
    logs.mkdir(parents=True)
    (logs / "rank-0.log").write_text("error")
    assert not remove_new([], logs)  # they were there before
    (logs.parent / "config.yaml").write_text("")
    assert not remove_new([logs, logs.parent], logs)  # the run has started
    assert logs.is_dir()
    (logs.parent / "config.yaml").unlink()
    (tmp_path / "runs" / "other").mkdir()
    assert remove_new([logs, logs.parent, tmp_path / "runs"], logs)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["other"]


@pytest.mark.parametrize("had_run", [False, True])
def test_fresh_applies_until_the_new_run_has_the_directory(had_run, tmp_path, monkeypatch):
    """A run that is restarted goes on; it is not moved aside again, and the old one is not resumed."""
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
        return Attempt((), "starting")

    monkeypatch.setattr(attempts, "run_processes", run_processes)
    monkeypatch.setattr(attempts.time, "sleep", lambda seconds: None)
    config = SimpleNamespace(run=SimpleNamespace(dir=str(folder)), timeouts=SimpleNamespace(stop=1))
    assert run_attempts(config, attempt, fresh=True, restarts=5) == 0
    assert asked == [True, True, False, False]
