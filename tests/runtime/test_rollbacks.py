"""`train.not_finite: roll_back`: a run that meets values that are not finite is the run without the batches of them.

The reference is trained on files from which these rows were deleted by NumPy: it knows of no batches that are left out.
"""

import json
import shutil
from contextlib import closing

import numpy as np
import pytest
from spmdkit.configs import load_config
from spmdkit.data.source import BadDataError
from spmdkit.mesh.errors import UserError
from spmdkit.runtime.build_run import build
from spmdkit.runtime.rollbacks import Rollbacks, batches_after, check_first_batch, check_position, data_position
from support.runs import assert_same_arrays, losses, metrics, rows_of_files, state_arrays, train, write_config

ROWS, BATCH, STEPS = 400, 16, 12


def write_rows(folder, *, spoilt=(), deleted=()):
    """Rows of which some batches hold a NaN, or are not there; the module that reads them; gives the folder."""
    folder.mkdir()
    random = np.random.default_rng(0)
    inputs = random.normal(size=(ROWS, 64)).astype(np.float32)
    targets = random.integers(0, 10, ROWS).astype(np.int32)
    for batch in spoilt:
        inputs[batch * BATCH + 3, 5] = np.nan
    gone = np.concatenate([np.arange(0)] + [np.arange(each * BATCH, (each + 1) * BATCH) for each in deleted])
    np.save(folder / "inputs.npy", np.delete(inputs, gone, axis=0))
    np.save(folder / "targets.npy", np.delete(targets, gone, axis=0))
    (folder / f"{module_of(folder)}.py").write_text(rows_of_files())
    return folder


def module_of(folder):
    return f"rows_of_{folder.parent.name}"


def rows_config(folder, **sections):
    given = {
        "data": {"source": f"{module_of(folder)}:make", "shuffle": False},
        "train": {"steps": STEPS, "global_batch": BATCH, "not_finite": "roll_back"},
        "eval": {"every": 0, "batches": 1},
    }
    return write_config(folder, **{**given, **sections})


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """A run over the rows without batches 0, 5 and 9."""
    config = rows_config(write_rows(tmp_path_factory.mktemp("without") / "rows", deleted=(0, 5, 9)))
    train(config)
    return config


def assert_same_run(config, without):
    """The same losses at the same steps, each once, and the same last state, bit for bit."""
    found, expected = losses(config.parent / "run"), losses(without.parent / "run")
    assert [record["step"] for record in metrics(config.parent / "run")] == list(range(1, STEPS + 1))
    assert found == expected
    assert np.isfinite([*found.values()]).all()
    assert_same_arrays(state_arrays(config, STEPS), state_arrays(without, STEPS))


@pytest.mark.slow
def test_the_run_is_the_one_without_these_batches(tmp_path, without, cli):
    """The first goes back to the first parameters, the others to checkpoints; a reader of the folder sees all of it."""
    config = rows_config(write_rows(tmp_path / "rows", spoilt=(0, 5, 9)))
    printed = cli(0, "train", config).out
    assert_same_run(config, without)
    run = tmp_path / "rows" / "run"
    told = json.loads((run / "rollbacks.json").read_text())["rollbacks"]
    assert [(each["step"], each["to"], each["batch"], each["samples"]) for each in told] == [
        (1, 0, 0, [0, 15]),
        (5, 4, 5, [80, 95]),
        (8, 4, 9, [144, 159]),
    ]
    assert "Went back to step 4; batch 5 (samples 80 to 95) is left out from now on. Rollback 2 of" in printed
    assert [record["rollbacks"] for record in metrics(run)] == [1] * 4 + [3] * 8
    assert ", 3 rollbacks, " in printed.partition("Goodput")[2].partition("\n")[0]
    assert "3 rollbacks" in (run / "report.html").read_text()


@pytest.mark.slow
def test_a_run_that_is_stopped_after_a_rollback_goes_on_as_the_same_run(tmp_path, without, capsys, cli):
    config = rows_config(write_rows(tmp_path / "rows", spoilt=(0, 5, 9)))
    run = config.parent / "run"
    printed = cli(3, "train", config, "train.most_not_finite=2").err
    assert "error: Step 8: the loss is nan and the norm of the gradients nan. It went back 2 times before" in printed
    assert "\n  step 5 (2" in printed
    assert "raise train.most_not_finite" in printed
    assert [*losses(run)] == [1, 2, 3, 4, 5, 6, 7]
    shutil.copytree(run, tmp_path / "before")
    printed = cli(0, "train", config).out
    assert "Left out since a rollback: step 1 (2" in printed
    assert_same_run(config, without)
    train(config, f"run.dir={tmp_path / 'before'}", "train.most_not_finite=2", code=3)  # rollbacks of before count
    assert "It went back 2 times before" in capsys.readouterr().err


def test_the_step_that_is_written_down_is_the_one_that_was_restored(tmp_path):
    """Checkpoint 8 was to be the one, and was damaged."""
    config = load_config(rows_config(write_rows(tmp_path / "rows")))
    rollbacks = Rollbacks(config.train.max_rollbacks, config.train.global_batch, tmp_path, 1.0)
    rollbacks.add(10, "the loss is nan", 8)
    assert rollbacks.left_out == (9,)
    assert not (tmp_path / "rollbacks.json").exists()
    assert "Step 10: the loss is nan. Went back to step 4; batch 9 (samples 144 to 159)" in rollbacks.write(4)
    assert [each["to"] for each in json.loads((tmp_path / "rollbacks.json").read_text())["rollbacks"]] == [4]


STOPPING = """
import os, signal, time

class Stopping:
    def on_step_begin(self, run):
        if run.step == 8 and not (run.folder / "rollbacks.json").exists():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)  # until the gate has heard of it
"""


@pytest.mark.slow
def test_a_signal_before_a_rollback_stops_at_the_step_gone_back_to(tmp_path, capsys):
    folder = write_rows(tmp_path / "rows", spoilt=(7,))
    (folder / "stopping.py").write_text(STOPPING)
    train(rows_config(folder, callbacks=[{"name": "stopping:Stopping"}]), code=75)
    assert "Stopped by SIGTERM after step 4 of 12" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_that_starts_anew_leaves_nothing_out(tmp_path):
    config = rows_config(write_rows(tmp_path / "rows", spoilt=(2,)), train={"steps": 3, "global_batch": BATCH})
    (config.parent / "run").mkdir()
    told = {"step": 3, "to": 0, "batch": 2, "samples": [32, 47], "found": "nan", "at": "now"}
    (config.parent / "run" / "rollbacks.json").write_text(json.dumps({"rollbacks": [told]}))
    train(config)
    train(config, "--fresh", code=3)
    assert not (config.parent / "run" / "rollbacks.json").exists()


@pytest.mark.parametrize("text", ["{", '{"rollbacks": [{"step": 1}]}'])
def test_a_damaged_file_is_no_reason_to_train_on_what_was_left_out(text, tmp_path, cli):
    config = rows_config(write_rows(tmp_path / "rows"))
    (config.parent / "run").mkdir()
    (config.parent / "run" / "rollbacks.json").write_text(text)
    assert "rollbacks.json is corrupt (" in cli(2, "train", config).err


@pytest.mark.slow
def test_the_policies_meet_the_same_batch(tmp_path, capsys):
    """Stopped, the reader names the row; skipped, the update is left out and the step counts."""
    folder = write_rows(tmp_path / "rows", spoilt=(2,))
    few = {"steps": 4, "global_batch": BATCH}
    train(rows_config(folder, train=few), code=3)
    assert "inputs of example 35 of the training split at [5] is nan: not a finite number" in capsys.readouterr().err
    train(folder / "tiny.yaml", f"run.dir={tmp_path / 'skipped'}", "train.not_finite=skip")
    message = "Step 3: the loss is nan and the norm of the gradients nan; its update was left out (train.not_finite)."
    assert message in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("option", ["compress: int8", "local_steps: 3"])
def test_a_run_over_slow_links_skips_one_batch_and_recovers(option, tmp_path, capsys):
    folder = write_rows(tmp_path / "rows", spoilt=(2,))
    short = {"steps": 6, "global_batch": BATCH, "not_finite": "skip"}
    train(rows_config(folder, train=short), f"strategy={{data: {{size: 8, {option}}}}}")
    printed = capsys.readouterr().out
    assert printed.count("its update was left out (train.not_finite).") == 1
    assert ("The groups do not meet (strategy.data.local_steps=3)" in printed) == (option == "local_steps: 3")
    assert metrics(folder / "run")[-1]["skipped"] == 1


STREAM = """
import numpy as np
from spmdkit.data import from_batches

def batch(value):
    return {"inputs": np.full((16, 64), value, np.float32), "targets": np.zeros(16, np.int64)}

def spoilt(config):
    return from_batches([batch(0.0), batch(np.nan)], [batch(0.0)])
"""


def examples(run, start, left_out=()):
    """The numbers of the samples of each batch."""
    with closing(batches_after(start, run, left_out)) as batches:
        return [np.asarray(batch["example"]).tolist() for batch in batches]


def test_from_any_step_on_they_are_those_of_the_whole_run(tmp_path):
    run = build(load_config(write_config(tmp_path, train={"steps": 5, "global_batch": 16})))
    whole = examples(run, 0)
    assert whole == [[*range(16 * step, 16 * step + 16)] for step in range(5)]
    assert examples(run, 3) == whole[3:]
    assert examples(run, 0, left_out={1})[:4] == [whole[0], *whole[2:]]


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_spoilt_values_reach_the_step_where_the_run_goes_on_after_them(policy, tmp_path, monkeypatch):
    (tmp_path / f"spoilt_{policy}.py").write_text(STREAM)
    monkeypatch.syspath_prepend(tmp_path)
    data = {"source": f"spoilt_{policy}:spoilt", "prefetch": 0}
    train = {"steps": 2, "global_batch": 16, "not_finite": policy}
    run = build(load_config(write_config(tmp_path, data=data, train=train)))
    with closing(batches_after(0, run)) as batches:
        assert np.isfinite(next(batches)["inputs"]).all()
        if policy == "skip":
            assert np.isnan(next(batches)["inputs"]).all()
        else:
            with pytest.raises(BadDataError, match="inputs"):
                next(batches)


def test_notes_how_far_the_data_was_read():
    assert data_position(0, ()) == {"batches": 0, "left_out": []}
    assert data_position(10, ()) == {"batches": 10, "left_out": []}
    assert data_position(10, {14}) == {"batches": 10, "left_out": []}, "a rollback after the checkpoint"
    assert data_position(4, {0, 5}) == {"batches": 5, "left_out": [0]}, "of the step right after it"
    assert data_position(10, {7, 3}) == {"batches": 12, "left_out": [3, 7]}
    check_position({"batches": 10, "left_out": []}, 10, {14})
    with pytest.raises(UserError, match=r"after 11 batches of .*of which \[3\] were left out.*now gives 11 and \[4\]"):
        check_position({"batches": 11, "left_out": [3]}, 10, {4})


def test_rejects_a_first_batch_that_was_read_before(tmp_path):
    run = build(load_config(write_config(tmp_path, train={"steps": 5, "global_batch": 16})))
    with closing(batches_after(2, run, {0})) as batches:
        batch = next(batches)
    check_first_batch(batch, 2, {0})
    for step, left_out in ((3, {0}), (1, {0}), (2, ())):
        with pytest.raises(RuntimeError, match="begins with sample 48 instead of"):
            check_first_batch(batch, step, left_out)
