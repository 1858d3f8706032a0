"""What a sweep decides before and after its runs; tests/multiprocess/test_sweep.py trains."""

import json
from signal import SIGTERM

import pytest
from runs import write_config
from spmdkit.launch.sweeping.look import Seen
from spmdkit.launch.sweeping.planning import Asked
from spmdkit.launch.sweeping.sweep import CannotRun, sweep, worst
from spmdkit.launch.sweeping.training import Trained

COSTS = {"devices": 8, "predicted_bytes": 2048, "collective_bytes": 100}


@pytest.fixture
def processes(monkeypatch):
    """Takes the place of the processes: what a look finds, and how a run ends, by the name of the run."""
    looks, ends = {}, {}

    def look(source, overrides, *, fresh=False):
        return next((seen for name, seen in looks.items() if name in overrides[-1]), Seen(COSTS))

    def train(asked, run, place):
        ended = ends.get(run.name, Trained(0))
        return ended(run) if callable(ended) else ended

    monkeypatch.setattr("spmdkit.launch.sweeping.sweep.look_apart", look)
    monkeypatch.setattr("spmdkit.launch.sweeping.sweep.train_apart", train)
    return looks, ends


def told(printed):
    return [(each["status"], each["exit_code"]) for each in json.loads(printed.out)["runs"]]


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([], 0),
        ([0, None, 0], 0),
        ([3], 3),
        ([3, 75], 75),
        ([2, 3, 1], 1),
        ([2, 3], 3),
        ([2], 2),
        ([77], 77),
        ([77, 2], 2),
    ],
)
def test_of_several_exit_codes_what_may_mend_counts(codes, expected):
    assert worst(codes) == expected


def test_all_that_cannot_run_is_told_at_once_and_nothing_is_written(tmp_path):
    config = write_config(tmp_path)
    words = ["train.global_batch=15,17", "optimizer.name=sgd,adm"]
    with pytest.raises(CannotRun) as caught:
        sweep(Asked(str(config), words))
    text = str(caught.value)
    assert text.startswith("4 of 4 combinations cannot run, so nothing was trained:\nglobal_batch=15,name=sgd:\n  1 pr")
    assert text.count("train.global_batch=15 rows cannot be split evenly") == 2
    assert text.count("'adm'") == 2
    assert text.endswith("\nCorrect them.")
    assert caught.value.exit_code == 2
    assert not (tmp_path / "run").exists()


def test_a_reason_of_several_is_told_once(tmp_path):
    config = write_config(tmp_path)
    with pytest.raises(CannotRun) as caught:
        sweep(Asked(str(config), ["train.stps=3", "run.seed=0,1"], skip_invalid=True))
    assert str(caught.value).splitlines() == [
        "2 of 2 combinations cannot run, so nothing was trained:",
        "seed=0, seed=1:",
        "  1 problem on the command line:",
        "    train.stps=3: train.stps is not a key. Did you mean train.steps?",
        "Correct them.",
    ]


def test_only_mistakes_are_left_out(tmp_path, processes, capsys):
    """What is no mistake still counts in the exit code."""
    processes[0].update({"seed=0": Seen({}, "it is in use", 75), "seed=1": Seen({}, "it cannot be", 2)})
    asked = Asked(str(write_config(tmp_path)), ["run.seed=0,1,2"], skip_invalid=True)
    assert sweep(asked, as_json=True) == 75
    printed = capsys.readouterr()
    assert told(printed) == [("failed", 75), ("left out", 2), ("finished", 0)]
    assert "1 of 3 combinations cannot run, and is left out (--skip-invalid):" in printed.err
    assert "1 of 3 combinations cannot be trained now:\nspmdkit sweep: seed=0 (exit code 75):" in printed.err
    assert sweep(asked, as_json=True, dry_run=True) == 75


def test_mistakes_alone_may_be_left_out(tmp_path, processes, capsys):
    processes[0]["seed=1"] = Seen({}, "it cannot be", 2)
    asked = Asked(str(write_config(tmp_path)), ["run.seed=0,1"], skip_invalid=True)
    assert sweep(asked, as_json=True) == 0
    assert told(capsys.readouterr()) == [("finished", 0), ("left out", 2)]


@pytest.mark.parametrize(
    ("codes", "code", "remedy"),
    [
        ([2, 0], 2, "Correct them, or leave them out with --skip-invalid."),
        ([75, 0], 75, "What ended with 75 is no mistake: the same command may work later."),
        ([2, 75], 75, "Correct the mistakes. What ended with 75 is no mistake: the same command may work later."),
        ([1, 0], 1, "seed=0 (exit code 1):"),
    ],
)
def test_the_remedy_is_that_of_the_exit_code(tmp_path, processes, codes, code, remedy):
    processes[0].update({f"seed={seed}": Seen({}, "so it is", each) for seed, each in enumerate(codes) if each})
    with pytest.raises(CannotRun) as caught:
        sweep(Asked(str(write_config(tmp_path)), ["run.seed=0,1"]))
    assert caught.value.exit_code == code
    assert remedy in str(caught.value)
    assert ("Correct" in str(caught.value)) == (2 in codes)


@pytest.mark.parametrize(("fresh", "said"), [(False, "the same command goes"), (True, "without --fresh goes")])
def test_what_goes_on_after_a_signal(tmp_path, processes, capsys, fresh, said):
    processes[1]["seed=0"] = Trained(75, "stopped by SIGTERM", SIGTERM)
    assert sweep(Asked(str(write_config(tmp_path)), ["run.seed=0,1"], fresh=fresh)) == 75
    assert (
        f"stopped by SIGTERM; the same command {said.removeprefix('the same command ')} on" in capsys.readouterr().err
    )


def test_files_that_cannot_be_written_are_told_and_no_more(tmp_path, processes, capsys):
    """The runs go on, the table comes, and the exit code is theirs."""
    for name in ("sweep.json", "sweep.html"):
        (tmp_path / "run" / name / "in the way").mkdir(parents=True)
    processes[1].update(dict.fromkeys(("seed=0", "seed=1"), log_a_step))
    assert sweep(Asked(str(write_config(tmp_path)), ["run.seed=0,1"]), as_json=True) == 0
    printed = capsys.readouterr()
    assert told(printed) == [("finished", 0), ("finished", 0)]
    assert "sweep.json cannot be written: Is a directory; the sweep goes on without it" in printed.err
    assert "sweep.html cannot be written: Is a directory" in printed.err
    assert sorted(path.name for path in (tmp_path / "run").iterdir() if path.name.startswith("sweep.json")) == [
        "sweep.json"
    ]


def log_a_step(run, loss=2.0, code=0):
    """What a run does that takes its folder."""
    if run.folder.exists():
        run.folder.rename(f"{run.folder}.old-1")
    run.folder.mkdir(parents=True)
    (run.folder / "config.yaml").write_text("train: {steps: 12}\n")
    (run.folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": loss}) + "\n")
    return Trained(code)


def test_figures_of_a_discarded_run_are_not_shown(tmp_path, processes, capsys):
    asked = Asked(str(write_config(tmp_path)), ["run.seed=0,1"])
    processes[1].update(dict.fromkeys(("seed=0", "seed=1"), log_a_step))
    sweep(asked)
    processes[1].update({"seed=0": lambda run: log_a_step(run, 7.0), "seed=1": Trained(75, "it is in use")})
    capsys.readouterr()
    for dry_run, losses in ((True, [None, None]), (False, [7.0, None])):
        sweep(asked._replace(fresh=True), dry_run=dry_run, as_json=True)
        runs = json.loads(capsys.readouterr().out)["runs"]
        assert [each.get("loss") for each in runs] == losses
