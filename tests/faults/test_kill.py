"""kill -9 at any moment, then the same command again: what follows is what would have been, bit for bit."""

from pathlib import Path

import pytest
from spmdkit.launch.cli import main
from support.runs import assert_same_arrays, listing, metrics, run_at_moment, state_arrays, write_config

STEPS = 12
SAVE = "spmdkit.checkpoints.manager:Checkpoints.save"
RECORD = "spmdkit.training.metrics:MetricsLog.write"
SAVED = {"every": 4, "keep": 1}

MOMENTS = {  # what is about to happen, for the how-manieth time, and the step of the newest checkpoint where it is sure
    "before the first checkpoint": (RECORD, 3, 0),
    "while the first checkpoint is written": ("event:os.rename:checkpoints/4'", 1, 0),
    "between two checkpoints": (RECORD, 10, None),
    "in an evaluation": ("spmdkit.runtime.run_context:StepHooks.evaluate", 2, None),
    "while a checkpoint is written": ("event:os.rename:checkpoints/8'", 1, 4),
    "while an old checkpoint is removed": ("event:os.rename:removed-", 1, 8),
    "between the last step and its checkpoint": (SAVE, 3, None),
    "before the report is written": ("spmdkit.report.reporter:write_report", 1, STEPS),
}

pytestmark = [pytest.mark.slow, pytest.mark.faults]


def killed(moment: str, count: int, config: Path) -> None:
    """Trains, and dies at the moment."""
    ended = run_at_moment(moment, str(count), "signal", "SIGKILL", "train", config)
    assert ended.returncode == -9, ended.stdout + ended.stderr


def held(config: Path) -> int:
    """The step of the newest complete checkpoint."""
    folder = config.parent / "run" / "checkpoints"
    return max((int(path.name) for path in folder.glob("*") if path.name.isdecimal()), default=0)


def assert_same_run(config: Path, expected: Path) -> None:
    assert metrics(config.parent / "run") == metrics(expected.parent / "run")
    assert_same_arrays(state_arrays(config, STEPS), state_arrays(expected, STEPS))


@pytest.fixture(scope="module")
def classifier(tmp_path_factory) -> Path:
    """The config of a run that nothing happened to."""
    config = write_config(tmp_path_factory.mktemp("classifier"), checkpoint=SAVED)
    assert main(["train", str(config)]) == 0
    return config


@pytest.mark.parametrize("name", MOMENTS)
def test_killed_run_resumes_bitwise(name, classifier, tmp_path, capsys):
    moment, count, newest = MOMENTS[name]
    config = write_config(tmp_path, checkpoint=SAVED)
    killed(moment, count, config)
    resumed_at = held(config)
    assert newest in (None, resumed_at)
    assert main(["train", str(config)]) == 0
    message = f"Resuming {tmp_path / 'run'} at step {resumed_at} of {STEPS}."
    assert (message in capsys.readouterr().out) == (resumed_at > 0)
    assert_same_run(config, classifier)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("[0-9]*")] == [str(STEPS)]
    assert (tmp_path / "run" / "report.html").is_file()


def test_finished_run_stays_unchanged(classifier, capsys):
    folder = classifier.parent / "run"
    before = listing(folder)
    assert main(["train", str(classifier), "strategy={data: 8}"]) == 0
    assert (
        f"{folder} is finished: it holds step {STEPS} of {STEPS}. Raise train.steps to go on" in capsys.readouterr().out
    )
    assert listing(folder) == before
