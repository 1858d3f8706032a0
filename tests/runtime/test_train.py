"""`spmdkit train` in this process: what a run writes, and that what cannot work leaves no trace."""

import json
import sys

import numpy as np
import orbax.checkpoint as ocp
import pytest
from spmdkit.configs import load_config
from spmdkit.mesh import processes
from spmdkit.runtime import training_run as under_way
from spmdkit.training.optimizing.learning_rates import make_learning_rate
from support.runs import listing, losses, train, write_config


def test_what_a_run_leaves(tmp_path, capsys):
    config = write_config(tmp_path, run={"simulate": 8, "log_every": 5}, checkpoint={"every": 4, "keep": 2})
    train(config)
    folder = tmp_path / "run"
    files = "compilation.json config.yaml goodput.jsonl metrics.jsonl provenance.json report.html report.json"
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoints", *files.split()]
    assert sorted(int(path.name) for path in (folder / "checkpoints").iterdir()) == [8, 12]
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [4, 5, 8, 10, 12]
    assert [record["step"] for record in records if "eval_loss" in record] == [4, 8, 12]
    speeds = {f"{name}_per_second" for name in ("tokens", "rows", "flops")}
    assert set(records[1]) == {"step", "loss", "grad_norm", "seconds", "learning_rate", "run", *speeds}
    loaded = load_config(config)
    schedule = make_learning_rate(loaded.optimizer.learning_rate, loaded.optimizer.schedule, loaded.train.steps)
    rates = np.asarray(schedule(np.arange(loaded.train.steps)))
    assert [record["learning_rate"] for record in records] == [float(rates[step - 1]) for step in (4, 5, 8, 10, 12)]
    printed = capsys.readouterr().out
    assert printed.startswith("mlp, 2,410 parameters, synthetic: 8,192 noisy images")
    assert "mesh data 2 x fsdp 4" in printed.partition("\n")[0]
    assert "step  4/12  loss " in printed


def test_a_process_after_the_first_prints_nothing_and_only_writes_checkpoints(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(processes.is_main_process, "__code__", (lambda: False).__code__)  # for all who imported it
    (tmp_path / "run").mkdir()
    train(write_config(tmp_path), "train.steps=2")
    assert capsys.readouterr() == ("", "")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoints"]


@pytest.mark.slow
def test_the_deadline_of_a_save_reaches_its_writer(tmp_path, monkeypatch):
    given, original = [], ocp.AsyncOptions
    monkeypatch.setattr(ocp, "AsyncOptions", lambda **options: given.append(options) or original(**options))
    train(write_config(tmp_path), "timeouts.save=5000", "train.steps=1")
    assert [options["timeout_secs"] for options in given] == [5000]


@pytest.fixture
def nothing_compiles(monkeypatch):
    def compile_step(built):
        raise AssertionError("the step was compiled before all was checked")

    monkeypatch.setattr(under_way, "explain_built", compile_step)


SMALL_EVALUATION = """
import numpy as np
from spmdkit.data import Splits, from_arrays

def rows(number, **more):
    return {"inputs": np.ones((number, 64), np.float32), "targets": np.arange(number) % 10, **more}

def make(evaluation):
    splits = from_arrays(rows(64))
    return lambda config: splits._replace(evaluation=evaluation)

empty = make([])
labels = make(from_arrays(rows(20, targets=np.arange(20))).train)
fractions = make(from_arrays(rows(20, targets=np.full(20, 0.5))).train)
"""


@pytest.mark.usefixtures("nothing_compiles")
@pytest.mark.parametrize(
    ("overrides", "code", "text"),
    [
        (["train.global_batch=10000"], 2, "rows, but the training split has only 7772 examples"),
        (["data.source=evaluations:empty"], 2, "returned no examples for evaluation"),
        (["data.source=evaluations:labels"], 3, "example 10 of the evaluation split is 10; model.classes=10"),
        (["data.source=evaluations:fractions"], 3, "targets are float64; model.classes=10 requires integers, 0 .. 9."),
        (["model.classes=5"], 3, "; model.classes=5 allows 0 .. 4. Raise it, or fix the data. If it is padding, give"),
        (["optimizer.learning_rate=1e39"], 2, "must be a number of float32, at most 3.4e+38, got 1e+39 (number)"),
    ],
)
def test_failing_command_writes_nothing(overrides, code, text, tmp_path, cli, monkeypatch):
    (tmp_path / "evaluations.py").write_text(SMALL_EVALUATION)
    monkeypatch.delitem(sys.modules, "evaluations", raising=False)
    config = write_config(tmp_path)
    before = listing(tmp_path)
    assert text in cli(code, "train", config, *overrides).err
    left = {name: file for name, file in listing(tmp_path).items() if "__pycache__" not in name}
    assert (left, (tmp_path / "run").exists()) == (before, False)


STOPS_EARLY = """
import sys
from spmdkit.data import Splits, from_arrays
import numpy as np

class Reader:
    def __init__(self, end):
        self.end = end
        self.rows = from_arrays({"inputs": np.ones((64, 64), np.float32), "targets": np.zeros(64, np.int32)}).train
        self.shards = iter(range(5))

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return self.rows[index]

    def take(self, indices):
        if len(indices) > 1:
            self.end(self)
        return self.rows.take(indices)

def stops(config):
    return Splits(Reader(lambda self: next(self.shards)), None, None, "", "1")

def exits(config):
    return Splits(Reader(lambda self: next(self.shards, None) is None and sys.exit()), None, None, "", "1")
"""


@pytest.mark.parametrize(
    ("function", "line"), [("stops", "next(self.shards)), None, None"), ("exits", "next(self.shards, None)")]
)
def test_a_reader_cannot_end_a_run_as_if_it_were_finished(function, line, tmp_path, cli, monkeypatch):
    (tmp_path / "stops_early.py").write_text(STOPS_EARLY)
    monkeypatch.delitem(sys.modules, "stops_early", raising=False)
    config = write_config(tmp_path, data={"source": f"stops_early:{function}"})
    error = cli(2, "train", config, "checkpoint.every=100").err
    assert "stops_early.py, line" in error
    assert line in error


def test_reads_first_batch_before_the_first_write(tmp_path, cli):
    np.save(tmp_path / "ids.npy", np.full(4000, 300, np.uint16))
    data = {"source": "tokens", "files": [str(tmp_path / "ids.npy")], "length": 16, "vocabulary": 256}
    model = {"name": "transformer", "layers": 1, "width": 16, "heads": 2, "mlp_width": 32}
    config = write_config(tmp_path, data=data, model=model, strategy={"data": 8})
    assert "ids.npy contains token id 300; data.vocabulary=256 allows 0 .. 255." in cli(3, "train", config).err
    assert not (tmp_path / "run").exists()


def test_rejects_unusable_run_directory(tmp_path, cli, nothing_compiles):
    config = write_config(tmp_path)
    (tmp_path / "run" / "metrics.jsonl").mkdir(parents=True)
    for command in (["train"], ["launch", "--on", "local:2x4"]):
        error = cli(2, *command, config).err
        assert f"{tmp_path}/run/metrics.jsonl is a directory; a run keeps a file of that" in error
        error = cli(2, *command, config, f"run.dir={tmp_path}/{'n' * 300}").err
        assert "of run.dir cannot be created: File name too long." in error
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


@pytest.mark.slow
def test_a_checkpoint_that_does_not_fit_changes_nothing(tmp_path, cli, monkeypatch):
    """The config of the run stays the one its checkpoints are from."""
    config = write_config(tmp_path, train={"steps": 1, "global_batch": 16}, eval={"every": 0, "batches": 1})
    train(config)
    before = listing(tmp_path)
    overrides = ["train.steps=2", "strategy={data: {size: 8, compress: int8}}"]
    with monkeypatch.context() as patch:
        patch.setattr(under_way, "explain_built", None)  # nothing compiles
        assert "does not fit the state of this run" in cli(2, "train", config, *overrides).err
    assert listing(tmp_path) == before
    train(config, "run.seed=3", code=2)
    assert listing(tmp_path) == before
    (tmp_path / "run" / "provenance.json").write_text("{")  # --fresh does not read what it moves
    before = listing(tmp_path)
    assert (
        f"Moved the run in {tmp_path / 'run'} to {tmp_path / 'run.old-1'}: checkpoints, metrics.jsonl, report.html, "
        in cli(0, "train", config, "run.seed=3", "--fresh").out
    )
    moved = {name.removeprefix("run/"): held for name, held in before.items() if name.startswith("run/")}
    assert listing(tmp_path / "run.old-1") == moved
    assert list(losses(tmp_path / "run")) == [1]
    assert losses(tmp_path / "run") != losses(tmp_path / "run.old-1")
