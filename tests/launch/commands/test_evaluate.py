"""`spmdkit evaluate` as it is typed."""

import json
import shutil

import numpy as np
import pytest
from runs import metrics, write_config
from spmdkit.launch.cli import main


def call(capsys, *words):
    capsys.readouterr()
    code = main(["evaluate", *map(str, words)])
    return code, capsys.readouterr()


def test_it_says_what_it_evaluates(untrained, capsys):
    run = untrained.parent / "run"
    code, printed = call(capsys, run)
    title, data, split, loss, log = printed.out.splitlines()
    assert code == 0
    assert title == f"{run} at step 8: mlp, 2,410 parameters; mesh data 2 x fsdp 4"
    assert data.startswith("synthetic: 8,192 noisy images")
    assert split == "evaluation split: all 420 rows, 27 batches of 16"
    assert loss.split()[0] == "loss"
    assert 2 < float(loss.split()[1]) < 4
    assert log == "The log of the run has figures of 32 of them (eval.batches=2): --batches 2 takes the same."


@pytest.mark.parametrize(
    ("words", "split", "log"),
    [
        (["--batches", "2"], "evaluation split: 32 of 420 rows, 2 batches of 16, as in the log of the run", ""),
        (["eval.batches=2"], "evaluation split: 32 of 420 rows, 2 batches of 16, as in the log of the run", ""),
        (["--batches", "1"], "evaluation split: 16 of 420 rows, 1 batch of 16", "figures of 32 of them"),
        (["eval.batches=0"], "evaluation split: all 420 rows, 27 batches of 16", "figures of 32 of them"),
        (["--split", "train", "--batches", "3"], "train split: 48 of 7,772 rows, 3 batches of 16", ""),
        (["data.eval_fraction=0.1", "--batches", "1"], "evaluation split: 16 of 8", ""),
    ],
)
def test_it_says_which_rows_and_which_the_log_has(words, split, log, untrained, capsys):
    code, printed = call(capsys, untrained, *words)
    lines = printed.out.splitlines()
    assert code == 0
    assert lines[2].startswith(split)
    assert ("The log of the run" in lines[-1]) == bool(log)
    assert log in lines[-1]


def trained_otherwise(untrained, tmp_path, old="", new=""):
    """A run of the config of `untrained` whose own config.yaml says something else; run.dir=... of it."""
    folder = shutil.copytree(untrained.parent / "run", tmp_path / "run")
    own = (folder / "config.yaml").read_text()
    assert old in own
    (folder / "config.yaml").write_text(own.replace(old, new))
    return f"run.dir={folder}"


def test_the_log_is_that_of_the_run_and_not_of_the_config_given(untrained, tmp_path, capsys):
    run = trained_otherwise(untrained, tmp_path, "  batches: 2\n", "  batches: 5\n")
    code, printed = call(capsys, untrained, run, "--batches", "2")
    assert code == 0
    assert "as in the log" not in printed.out
    assert printed.out.splitlines()[-1].startswith("The log of the run has figures of 80 of them (eval.batches=5)")


@pytest.mark.parametrize(
    ("old", "new"), [("eval_fraction: 0.05", "eval_fraction: 0.2"), ("train:", "trian:"), ("data:", "\t{")]
)
def test_nothing_is_said_of_a_log_of_other_rows_or_of_an_unknown_one(old, new, untrained, tmp_path, capsys):
    code, printed = call(capsys, untrained, trained_otherwise(untrained, tmp_path, old, new), "--batches", "2")
    assert code == 0
    assert "log" not in printed.out.replace(str(tmp_path), "")


@pytest.mark.slow
def test_reports_both_values_if_the_log_has_another(untrained, tmp_path, capsys):
    folder = shutil.copytree(untrained.parent / "run", tmp_path / "run")
    loss = json.loads(call(capsys, folder, "--batches", "2", "--json")[1].out)["loss"]
    (folder / "metrics.jsonl").write_text(f'{{"step": 8, "loss": 1.0, "eval_loss": {loss}}}\n')
    code, printed = call(capsys, folder, "--batches", "2")
    assert (code, "warning" in printed.out, "as in the log of the run" in printed.out) == (0, False, True)
    (folder / "metrics.jsonl").write_text(f'{{"step": 8, "loss": 1.0, "eval_loss": {loss + 0.02}}}\n')
    code, printed = call(capsys, folder, "--batches", "2")
    assert (code, "as in the log of the run" in printed.out) == (0, False)
    warning = printed.out.splitlines()[-1]
    assert warning.startswith("warning: the log of the run has other values for the same rows and step: loss ")
    assert f"{loss:.6g} here, {loss + 0.02:.6g} in the log" in warning
    assert "warning" not in call(capsys, folder, "--batches", "2", "--step", "4")[1].out, "the log has no step 4"
    found = json.loads(call(capsys, folder, "--batches", "2", "--json")[1].out)
    assert (found["log"], found["differs_from_log"]) == ({"loss": loss + 0.02}, True)


def test_a_program_reads_which_rows_the_log_has(untrained, capsys):
    found = [json.loads(call(capsys, untrained, "--json", *words)[1].out) for words in ([], ["data.eval_fraction=0.1"])]
    assert [(each["rows_of_split"], each["rows_in_log"]) for each in found] == [(420, 32), (found[1]["rows"], None)]


def test_for_a_program_on_another_mesh_at_another_step(untrained, capsys):
    found = {}
    for words in (
        [],
        ["strategy={data: 1}"],
        ["--step", "4"],
        ["--batches", "2"],
        ["--split", "train", "--batches", "1"],
    ):
        code, printed = call(capsys, untrained, "--json", *words)
        assert code == 0
        found[" ".join(words)] = json.loads(printed.out)
    assert {name: (each["step"], each["rows"], each["split"]) for name, each in found.items()} == {
        "": (8, 420, "evaluation"),
        "strategy={data: 1}": (8, 420, "evaluation"),
        "--step 4": (4, 420, "evaluation"),
        "--batches 2": (8, 32, "evaluation"),
        "--split train --batches 1": (8, 16, "train"),
    }
    losses = [each["loss"] for each in found.values()]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert len({round(loss, 4) for loss in losses}) == 4


def test_data_in_other_files_is_evaluated_whole(untrained, tmp_path, capsys):
    random = np.random.default_rng(0)
    inputs = random.normal(size=(1003, 64)).astype(np.float32)
    np.savez(tmp_path / "new.npz", inputs=inputs, targets=random.integers(0, 10, 1003).astype(np.int32))
    words = ["data.source=arrays", f"data.files=[{tmp_path / 'new.npz'}]", "--json"]
    code, printed = call(capsys, untrained.parent / "run", *words)
    assert (code, json.loads(printed.out)["rows"]) == (0, 1003)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--step", "5"], "there are: 4, 8."),
        (["--batches", "0"], "--batches 0: at least 1 batch is evaluated."),
        (["strategy={fsdp: 16}"], "The mesh fsdp 16 needs 16 devices, and there are 8: 16 > 8."),
        (["train.globl_batch=8"], "train.globl_batch is not a key. Did you mean train.global_batch?"),
        (["data.eval_fraction=0"], "The run has no evaluation split (data.eval_fraction=0.0)"),
    ],
)
def test_mistakes_are_one_message(words, said, untrained, capsys):
    code, printed = call(capsys, untrained.parent / "run", *words)
    assert code == 2
    assert printed.err.startswith("error: ")
    assert said in printed.err
    assert "Traceback" not in printed.err


@pytest.mark.slow
def test_it_is_the_loss_that_training_found(tmp_path, capsys):
    config = write_config(tmp_path)
    assert main(["train", str(config)]) == 0
    trained = metrics(tmp_path / "run")[-1]["eval_loss"]
    _, printed = call(capsys, config, "--batches", "2", "--json")
    assert json.loads(printed.out)["loss"] == trained
