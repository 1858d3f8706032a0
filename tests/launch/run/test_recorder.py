"""What is recorded of a step: the same numbers in the file, on the display and for callbacks."""

from types import SimpleNamespace

import numpy as np
import pytest
from runs import metrics, write_config
from spmdkit.configs import load_config
from spmdkit.launch.cli import main
from spmdkit.launch.run.recorder import Recorder, counts_tokens, learning_rates
from spmdkit.training.callbacks.run import Run
from spmdkit.training.metrics import MetricsLog, read_metrics
from spmdkit.training.steps.late_log import Progress


def recorder(tmp_path, flops_per_row=None, vocabulary=256):
    """One of a run at half its rate, and what the display and the callbacks were given."""
    built = SimpleNamespace(
        config=load_config(write_config(tmp_path)),
        model=SimpleNamespace(flops_per_row=flops_per_row, flops_of_length=None),
        splits=SimpleNamespace(train=({"weights": np.ones(())},), vocabulary=vocabulary),
    )
    shown, called = [], []
    run = Run(folder=tmp_path, start=0, num_steps=12, learning_rate_factor=0.5)
    display, conductor = SimpleNamespace(update=shown.append), SimpleNamespace(logged=called.append)
    return Recorder(built, display, run, conductor), built.config, shown, called


def progress(step, **extra):
    return Progress(step=step, loss=2.5, grad_norm=0.5, tokens_per_second=64.0, seconds=0.25, extra=extra)


def test_a_step_is_a_line_and_all_are_told(tmp_path):
    recording, config, shown, called = recorder(tmp_path)
    with recording.open(tmp_path, 0):
        recording(progress(3, eval_loss=1.5))
    (line,) = list(read_metrics(tmp_path / "metrics.jsonl"))
    rate = line.pop("learning_rate")
    assert line == {
        "step": 3,
        "loss": 2.5,
        "grad_norm": 0.5,
        "tokens_per_second": 64.0,
        "seconds": 0.25,
        "eval_loss": 1.5,
    }
    cosine = 0.5 * (1 + np.cos(np.pi * 2 / 12))  # step 3 is updated with the rate of index 2
    assert rate == pytest.approx(0.5 * config.optimizer.learning_rate * cosine, rel=1e-6)
    assert shown == called == [{**line, "learning_rate": rate}]


def test_records_rows_per_second_of_a_model_without_tokens(tmp_path):
    recording, config, shown, _ = recorder(tmp_path, vocabulary=None)
    recording(progress(1))
    assert shown[0]["rows_per_second"] == config.train.global_batch / 0.25
    assert shown[0]["tokens_per_second"] == 64.0, "it stays for readers of the log"
    assert counts_tokens(SimpleNamespace(train=({"weights": np.ones(8)},), vocabulary=None))


def test_operations_of_a_model_that_says_how_many_it_has(tmp_path):
    recording, config, shown, _ = recorder(tmp_path, flops_per_row=1e6)
    recording(progress(1))
    assert shown[0]["flops_per_second"] == 1e6 * config.train.global_batch / 0.25
    assert not (tmp_path / "metrics.jsonl").exists(), "it was not opened"


def test_what_comes_after_the_step_of_a_resume_is_dropped(tmp_path):
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        for step in (4, 8):
            log.write({"step": step})
    recording, *_ = recorder(tmp_path)
    with recording.open(tmp_path, 4):
        recording(progress(5))
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [4, 5]


def test_a_schedule_that_gives_no_number_names_its_step(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "spmdkit.launch.run.recorder.make_learning_rate", lambda *_: lambda steps: np.where(steps == 7, np.nan, 0.1)
    )
    with pytest.raises(ValueError, match=r"optimizer\.schedule=.* gives step 8 the learning rate nan\."):
        learning_rates(load_config(write_config(tmp_path)))


PLATEAU = {"name": "plateau", "patience": 1, "window_steps": 1, "tolerance": 0.9, "factor": 0.5}
"""A loss that does not fall to a tenth of the lowest within a step halves the rate: from the second step on, always."""


@pytest.mark.slow
def test_the_rate_of_a_plateau_is_the_one_that_was_used(tmp_path):
    """Also of steps that are read late, of those after a resume, where a group has a schedule of its own, and where
    averages are kept."""
    groups = {"layers/.*/bias": {"schedule": {"name": "constant"}, "learning_rate": 0.5}}
    optimizer = {"name": "sgd", "learning_rate": 0.01, "schedule": PLATEAU, "groups": groups, "ema": {"decay": 0.9}}
    train = {"steps": 5, "global_batch": 16}
    config = write_config(tmp_path, optimizer=optimizer, train=train, checkpoint={"every": 5}, eval={"every": 3})
    assert main(["train", str(config)]) == 0
    assert main(["train", str(config), "train.steps=9", "run.log_every=2"]) == 0
    logged = {record["step"]: record["learning_rate"] for record in metrics(tmp_path / "run")}
    assert set(logged) >= {1, 2, 3, 4, 5, 6, 8, 9}
    assert logged == pytest.approx({step: 0.01 * 0.5 ** (step - 1) for step in logged}, rel=1e-6)
