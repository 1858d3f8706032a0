"""`spmdkit evaluate`, `predict` and `generate` from the command line."""

import argparse
import json
import shutil
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from spmdkit.launch.cli import main
from spmdkit.launch.commands import model_commands
from spmdkit.launch.commands.command import open_run
from spmdkit.launch.commands.model_commands import split_prompt
from spmdkit.mesh import processes
from spmdkit.runtime.loading import load_run
from support.processes import start_each, wait
from support.runs import leave_run, write_language_config

import spmdkit


def test_prints_run_data_and_loss(untrained, cli):
    run = untrained.parent / "run"
    title, data, split, loss, log = cli(0, "evaluate", run).out.splitlines()
    assert title == f"{run} at step 8: mlp, 2,410 parameters; mesh data 2 x fsdp 4"
    assert data.startswith("synthetic: 8,192 noisy images")
    assert split == "evaluation split: all 420 rows, 27 batches of 16"
    assert loss.split()[0] == "loss"
    assert 2 < float(loss.split()[1]) < 4
    assert log == "The log of the run is of 32 rows (eval.batches=2); --batches selects how many."


@pytest.mark.parametrize(
    ("words", "split", "log"),
    [
        (["--batches", "2"], "evaluation split: 32 of 420 rows, 2 batches of 16, as in the log of the run", ""),
        (["eval.batches=2"], "evaluation split: 32 of 420 rows, 2 batches of 16, as in the log of the run", ""),
        (["--batches", "1"], "evaluation split: 16 of 420 rows, 1 batch of 16", "is of 32 rows"),
        (["eval.batches=0"], "evaluation split: all 420 rows, 27 batches of 16", "is of 32 rows"),
        (["--split", "train", "--batches", "3"], "train split: 48 of 7,772 rows, 3 batches of 16", ""),
        (["--split", "train", "--batches", "9", "train.global_batch=4096"], "train split: all 7,772 rows", ""),
    ],
)
def test_prints_the_rows_of_result_and_log(words, split, log, untrained, cli):
    lines = cli(0, "evaluate", untrained, *words).out.splitlines()
    assert lines[2].startswith(split)
    assert ("The log of the run" in lines[-1]) == bool(log)
    assert log in lines[-1]


@pytest.mark.slow
def test_reports_both_values_if_the_log_has_another(untrained, tmp_path, cli):
    folder = shutil.copytree(untrained.parent / "run", tmp_path / "run")
    loss = json.loads(cli(0, "evaluate", folder, "--batches", "2", "--json").out)["loss"]
    for logged in (loss, loss + 0.02):
        (folder / "metrics.jsonl").write_text(f'{{"step": 8, "loss": 1.0, "eval_loss": {logged}}}\n')
        text = cli(0, "evaluate", folder, "--batches", "2").out
        assert ("as in the log of the run" in text) == (logged == loss)
        warning = text.splitlines()[-1]
        assert (f"loss {loss:.6g} here, {logged:.6g} in the log" in warning) == (logged != loss)
        found = json.loads(cli(0, "evaluate", folder, "--batches", "2", "--json").out)
        rows = {"rows": 32, "rows_of_split": 420, "rows_in_log": 32}
        log = {"log": {"loss": logged}, "differs_from_log": logged != loss}
        assert found.items() >= {"run": str(folder), "step": 8, "split": "evaluation", **rows, **log}.items()
    assert "warning" not in cli(0, "evaluate", folder, "--batches", "2", "--step", "4").out, "the log has no step 4"


@pytest.mark.slow
def test_json_on_another_mesh_and_step(untrained, cli):
    expected = {
        ("run.seed=0",): (8, 420, 32, "evaluation"),
        ("strategy={data: 1}",): (8, 420, 32, "evaluation"),
        ("--step", "4"): (4, 420, 32, "evaluation"),
        ("--batches", "2"): (8, 32, 32, "evaluation"),
        ("--split", "train", "--batches", "1"): (8, 16, None, "train"),
    }
    losses = []
    for words, facts in expected.items():
        found = json.loads(cli(0, "evaluate", untrained, "--json", *words).out)
        assert (found["step"], found["rows"], found["rows_in_log"], found["split"]) == facts
        losses.append(found["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert len({round(loss, 4) for loss in losses}) == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--batches", "0"], "--batches must be at least 1, got 0."),
        (["train.globl_batch=8"], "train.globl_batch is not a valid key. Did you mean train.global_batch?"),
    ],
)
def test_rejects_invalid_arguments(words, said, untrained, cli):
    printed = cli(2, "evaluate", untrained.parent / "run", *words)
    assert printed.err.startswith("error: ")
    assert said in printed.err
    assert "Traceback" not in printed.err


def read(path):
    with np.load(path) as archive:
        return dict(archive)


def test_writes_one_prediction_per_row(untrained, tmp_path, cli):
    words = ["--out", tmp_path / "out.npz", "--keep", "targets,example", "train.global_batch=64"]
    wrote = f"Wrote {tmp_path / 'out.npz'}: predictions 420x10, targets 420, example 420."
    assert wrote in cli(0, "predict", untrained.parent / "run", *words).out
    found = read(tmp_path / "out.npz")
    np.testing.assert_array_equal(found["example"], np.arange(420))
    alone = spmdkit.load_run(untrained.parent / "run", mesh={})
    rows = [alone.splits.evaluation[index] for index in range(420)]
    np.testing.assert_array_equal(found["targets"], [row["targets"] for row in rows])
    expected = alone.predict({"inputs": np.stack([row["inputs"] for row in rows])})
    np.testing.assert_allclose(found["predictions"], expected, rtol=1e-5, atol=1e-5)


def test_replaces_only_earlier_predictions_and_with_force(untrained, tmp_path, cli):
    words = ["predict", untrained, "--out", tmp_path / "out.npz"]
    cli(0, *words)
    assert "out.npz exists. Choose another name, or give --force to replace it" in cli(2, *words).err
    facts = json.loads(cli(0, *words, "--force", "--step", "4", "--json").out)
    written = {"file": str(tmp_path / "out.npz"), "arrays": {"predictions": [420, 10]}}
    assert facts == {"run": str(untrained.parent / "run"), "step": 4, **written}
    (tmp_path / "out.npz").write_bytes(b"mine")
    cli(2, *words, "--force")
    assert (tmp_path / "out.npz").read_bytes() == b"mine"


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.multiprocess
def test_several_processes_write_the_same(untrained, tmp_path):
    words = [untrained.parent / "run", "--keep", "targets", "--out"]
    ended = wait(start_each([("predict", *words, tmp_path / "two.npz")] * 2))
    assert [each.code for each in ended] == [0, 0], [each.stderr for each in ended]
    assert ["Wrote" in each.stdout for each in ended] == [True, False]
    assert main(["predict", *map(str, words), str(tmp_path / "one.npz")]) == 0
    one, two = read(tmp_path / "one.npz"), read(tmp_path / "two.npz")
    assert one.keys() == two.keys()
    np.testing.assert_array_equal(one["targets"], two["targets"])
    np.testing.assert_allclose(one["predictions"], two["predictions"], rtol=1e-6)


@pytest.fixture
def run_of_three_rows(monkeypatch):
    """A run that computes nothing; its list fills as predictions are read."""
    read = []
    run = SimpleNamespace(
        folder="runs/mine",
        step=4,
        splits=SimpleNamespace(train=None),
        source=lambda split: [None] * 3,
        evaluate=lambda source, max_batches: {"loss": 1.0},
        predictions=lambda source, keep: map(read.append, source),
        generate=lambda prompt: [97, 27],
        text=lambda tokens: bytes(tokens).decode(),
    )
    monkeypatch.setattr(model_commands, "open_run", lambda *_: nullcontext(run))
    return read


def test_processes_after_the_first_compute_and_print_nothing(run_of_three_rows, tmp_path, monkeypatch, cli):
    monkeypatch.setattr(processes, "is_main_process", lambda: False)
    for words in (["evaluate"], ["generate"], ["predict", "--out", tmp_path / "new.npz"]):
        assert cli(0, *words, "runs/mine").out == ""
    assert (len(run_of_three_rows), list(tmp_path.iterdir())) == (3, [])


@pytest.mark.usefixtures("run_of_three_rows")
def test_generate_prints_text_or_json(cli):
    assert cli(0, "generate", "runs/mine").out == "a\\x1b\n"
    found = json.loads(cli(0, "generate", "runs/mine", "--json").out)
    assert found == {"run": "runs/mine", "step": 4, "tokens": [97, 27], "text": "a\x1b"}


@pytest.mark.parametrize("ema", [True, False])
def test_opens_the_averages_if_they_are_asked_for(ema, monkeypatch):
    monkeypatch.setattr(load_run, "loaded", lambda *given, **options: (given, options["ema"]))
    arguments = argparse.Namespace(place="runs/mine", step=4, overrides=[], ema=ema)
    assert open_run(arguments) == (("runs/mine", 4, []), ema)


@pytest.mark.usefixtures("run_of_three_rows")
def test_zero_is_a_temperature_and_a_seed(cli, monkeypatch):
    opened, open_run = [], model_commands.open_run
    monkeypatch.setattr(model_commands, "open_run", lambda given: opened.extend(given.overrides) or open_run(given))
    cli(0, "generate", "runs/mine", "--temperature", "0", "--seed", "0")
    assert opened == ["sample.temperature=0.0", "run.seed=0"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([None], (None, [])),
        (["def main"], ("def main", [])),
        (["run.simulate=0"], (None, ["run.simulate=0"])),
        (["run.simulate=0", "def main", "strategy={data: 1}"], ("def main", ["run.simulate=0", "strategy={data: 1}"])),
        (["f(data=3)"], ("f(data=3)", [])),
        (["x=3", "train.stps=3"], ("x=3", ["train.stps=3"])),
        (["train.steps"], ("train.steps", [])),
    ],
)
def test_separates_one_prompt_and_overrides(words, expected):
    assert split_prompt(words[0], words[1:]) == expected
    with pytest.raises(ValueError, match=r"one PROMPT, got 2: 'def', 'main'\. Quote a prompt of several words"):
        split_prompt("def", ["main"])


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    config = write_language_config(tmp_path_factory.mktemp("generate"), strategy={"fsdp": 8}, sample={"length": 3})
    leave_run(config, steps=(4,))
    return config


@pytest.mark.slow
def test_continues_a_prompt(language, cli):
    run = language.parent / "run"
    found = json.loads(cli(0, "generate", run, "mesh ", "--length", "4", "--temperature", "0", "--json").out)
    assert (found["step"], bytes(found["tokens"][:5]), len(found["tokens"])) == (4, b"mesh ", 9)
    words = ["strategy={data: 1}", "mesh ", "--length", "4", "--temperature", "0", "run.seed=3"]
    assert cli(0, "generate", language, *words).out[:5] == "mesh "


@pytest.mark.slow
def test_defaults_come_from_the_config(language, cli):
    found = [json.loads(cli(0, "generate", language, "--json", *words).out) for words in ([], [], ["--seed", "7"])]
    assert bytes(found[0]["tokens"][:4]) == b"def "
    assert len(found[0]["tokens"]) == 7
    assert found[0] == found[1] != found[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--length", "1000000000"], "sample.length must be at most"),
        (["--temperature", "nan"], "sample.temperature must be a number"),
        (["\udcff"], "The prompt '\\udcff' is not valid UTF-8"),
    ],
)
def test_rejects_invalid_options(language, words, said, cli):
    printed = cli(2, "generate", language.parent / "run", *words)
    assert said in printed.err
    assert "Traceback" not in printed.err
