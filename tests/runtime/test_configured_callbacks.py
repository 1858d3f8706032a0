"""Callbacks of a config in real runs: what they change, what they leave, and how a run goes on with them."""

import json

import pytest
from spmdkit.launch.cli import main
from support.runs import assert_same_arrays, metrics, state_arrays, train, write_config, write_language_config

EARLY = {"name": "early_stopping", "patience": 2, "min_delta": 10.0}
PLATEAU = {"name": "reduce_on_plateau", "patience": 1, "min_delta": 10.0}
OPTIONS = {"eval": {"every": 2, "batches": 1}, "optimizer": {"learning_rate": 0.01}}


@pytest.mark.slow
def test_early_stopping_ends_a_run_that_then_is_finished(tmp_path, cli):
    config = write_config(tmp_path, **OPTIONS, callbacks=[EARLY])
    printed = cli(0, "train", config).out
    assert "Complete after step 6 of 12: early stopping, for eval_loss has not fallen by more than 10 from" in printed
    assert (tmp_path / "run" / "report.html").exists()
    assert [record["step"] for record in metrics(tmp_path / "run")][-1] == 6
    printed = cli(0, "train", config).out
    assert "is finished: it holds step 6 of 12 (early stopping, for eval_loss has not fallen" in printed
    assert "Change callbacks to go on" in printed
    (tmp_path / "run" / "report.html").unlink()
    train(config)  # writes it again, and trains no more
    assert (tmp_path / "run" / "report.html").exists()
    assert [record["step"] for record in metrics(tmp_path / "run")][-1] == 6
    printed = cli(0, "train", config, "callbacks=[{name: early_stopping, patience: 4, min_delta: 10}]").out
    assert "Complete after step 10 of 12" in printed
    assert "Goodput" in printed


TOUCHING = """
class Touching:
    def on_step_begin(self, run):
        if run.step == 6:
            (run.folder / "stop").touch()

def make():
    return Touching()
"""


@pytest.mark.slow
def test_resumed_after_an_interruption_every_step_is_the_same(tmp_path):
    """Stopped by a file in the midst, where nothing was due: bit for bit the run that was not."""
    (tmp_path / "own_touching.py").write_text(TOUCHING)
    config = write_config(
        tmp_path, **OPTIONS, callbacks=[PLATEAU, {"name": "own_touching:make"}, {"name": "stop_file", "seconds": 0}]
    )
    train(config, f"run.dir={tmp_path}/whole", "callbacks=[{name: reduce_on_plateau, patience: 1, min_delta: 10}]")
    train(config)
    stopped = metrics(tmp_path / "run")[-1]
    assert (stopped["step"], stopped["learning_rate"]) == (7, 0.0025)
    train(config)
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    whole = write_config(tmp_path, **OPTIONS, callbacks=[PLATEAU], run={"simulate": 8, "dir": str(tmp_path / "whole")})
    assert_same_arrays(state_arrays(config, 12), state_arrays(whole, 12))


@pytest.mark.slow_cases("False-0")
@pytest.mark.parametrize(("try_again", "code"), [(False, 0), pytest.param(True, 75, marks=pytest.mark.slow)])
def test_a_time_limit(try_again, code, tmp_path, capsys):
    """This process is older than a second."""
    limit = {"name": "time_limit", "after": "1s", "try_again": try_again}
    config = write_config(tmp_path, **OPTIONS, callbacks=[limit])
    train(config, code=code)
    assert "Stopped by the time limit of 1s after step 2 of 12; saved. The same command" in capsys.readouterr().out
    assert not (tmp_path / "run" / "report.html").exists()
    assert main(["report", str(config)]) == 0
    assert "Layout of every parameter" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    train(config, "callbacks=[]")
    assert metrics(tmp_path / "run")[-1]["step"] == 12


@pytest.mark.slow
def test_the_best_checkpoints_stay_beside_the_newest(tmp_path):
    best = [{"name": "best_checkpoint", "keep": 2, "mode": "max"}]
    often = {"eval": {"every": 2, "batches": 2}, "checkpoint": {"every": 3, "keep": 1}}
    config = write_config(tmp_path, callbacks=best, **often)
    train(config)
    best = {each["step"] for each in json.loads((tmp_path / "run" / "best.json").read_text())["best"]}
    evaluated = {r["step"]: r["eval_loss"] for r in metrics(tmp_path / "run") if "eval_loss" in r}
    assert best == set(sorted(evaluated, key=evaluated.__getitem__)[-2:])
    found = {int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.isdecimal()}
    assert found == {*best, 12}


def test_a_callback_that_ends_a_run_before_it_begins(tmp_path, capsys):
    (tmp_path / "own_ending.py").write_text(
        "class Ending:\n    def on_train_begin(self, run): run.stop('not today')\ndef make(): return Ending()\n"
    )
    train(write_config(tmp_path, **OPTIONS, callbacks=[{"name": "own_ending:make"}]))
    assert "Stopped by not today after step 0 of 12, before any other was trained." in capsys.readouterr().out
    assert not (tmp_path / "run" / "report.html").exists()


OWN = """
class Seeing:
    def on_train_begin(self, run):
        self.seen = [run.config["train"]["steps"], run.num_steps, run.start, run.examples, run.batch]

    def on_evaluation_end(self, run, metrics):
        self.seen.append((run.step, sorted(metrics), len(run.state.params["layers"])))
        if run.step == 4:
            raise ValueError(f"seen {self.seen}")

def make():
    return Seeing()
"""


def test_a_callback_of_the_users_own(tmp_path, cli):
    (tmp_path / "own_seeing.py").write_text(OWN)
    config = write_config(tmp_path, **OPTIONS, callbacks=[{"name": "own_seeing:make"}])
    error = cli(2, "train", config).err
    assert "callbacks.0 (own_seeing:make), on_evaluation_end fails in " in error
    assert "own_seeing.py, line 9 (" in error
    assert "seen [12, 12, 0, 7772, 16, (2, ['eval_loss'], 2), (4, ['eval_loss'], 2)]" in error


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        ({"callbacks": ["samples"]}, "samples require a model of text that has a `predict`. Remove samples."),
        ({"callbacks": [{"name": "own_other:makes"}]}, "does not define makes. Did you mean make?"),
        (
            {"callbacks": ["early_stopping"], "data": {"source": "synthetic", "eval_fraction": 0.0}},
            "callbacks.0 (early_stopping) needs eval_loss, but the evaluation split is missing.",
        ),
        (
            {"callbacks": [{"name": "stop_file", "path": "config.yaml"}]},
            "callbacks.0.path='config.yaml' leads to config.yaml, which the run keeps in run.dir.",
        ),
    ],
)
def test_rejects_invalid_callbacks_before_any_write(sections, text, tmp_path, cli):
    (tmp_path / "own_other.py").write_text(OWN)
    assert text in cli(2, "train", write_config(tmp_path, **sections)).err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_samples_of_a_language_model(tmp_path, capsys):
    samples = [{"name": "samples", "prompt": "the mesh", "length": 8, "temperature": 0.0}]
    short = {"train": {"steps": 2, "global_batch": 16}, "eval": {"every": 1, "batches": 1}}
    config = write_language_config(tmp_path, callbacks=samples, **short)
    train(config)
    kept = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert [each["step"] for each in kept] == [1, 2]
    assert all(each["text"].startswith("the mesh") and len(each["text"]) > 8 for each in kept)
    assert "Step 2 writes:" in capsys.readouterr().out
