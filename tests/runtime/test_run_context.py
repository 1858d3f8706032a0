"""What is recorded of a step: the same numbers in the file, on the display and for callbacks."""

from types import SimpleNamespace

import numpy as np
import pytest
from spmdkit.configs import load_config
from spmdkit.data import bucket_by_length, from_dataset
from spmdkit.launch.cli import main
from spmdkit.models.transformer import transformer
from spmdkit.models.transformer_config import TransformerConfig
from spmdkit.runtime import run_context
from spmdkit.runtime.run_context import FlopsOfSteps, Recorder, counts_tokens
from spmdkit.training.callbacks.callback import Run
from spmdkit.training.metrics import read_metrics
from spmdkit.training.steps.late_log import Progress
from support.runs import metrics, write_config


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
    return Progress(
        step=step,
        loss=2.5,
        grad_norm=0.5,
        weight_per_second=64.0,
        rows_per_second=128.0,
        seconds=0.25,
        extra=extra,
    )


def test_a_step_is_a_line_and_all_are_told(tmp_path):
    recording, config, shown, called = recorder(tmp_path)
    with recording.open(tmp_path, 0):
        recording(progress(3, eval_loss=1.5))
    (line,) = list(read_metrics(tmp_path / "metrics.jsonl"))
    rate = line.pop("learning_rate")
    losses = {"loss": 2.5, "grad_norm": 0.5, "eval_loss": 1.5}
    assert line == {"step": 3, "tokens_per_second": 64.0, "seconds": 0.25, **losses}
    cosine = 0.5 * (1 + np.cos(np.pi * 2 / 12))  # step 3 is updated with the rate of index 2
    assert rate == pytest.approx(0.5 * config.optimizer.learning_rate * cosine, rel=1e-6)
    assert shown == called == [{**line, "learning_rate": rate}]


def test_records_rows_per_second_of_a_model_without_tokens(tmp_path):
    recording, _, shown, _ = recorder(tmp_path, vocabulary=None)
    recording(progress(1))
    assert shown[0]["rows_per_second"] == 128.0
    assert shown[0]["tokens_per_second"] == 64.0, "it stays for readers of the log"
    assert counts_tokens(SimpleNamespace(train=({"weights": np.ones(8)},), vocabulary=None))


def test_operations_of_a_model_that_says_how_many_it_has(tmp_path):
    recording, config, shown, _ = recorder(tmp_path, flops_per_row=1e6)
    recording(progress(1))
    assert shown[0]["flops_per_second"] == 1e6 * config.train.global_batch / 0.25
    assert not (tmp_path / "metrics.jsonl").exists(), "it was not opened"


def test_the_scale_of_a_step_is_kept_until_it_is_read(tmp_path):
    recording, *_ = recorder(tmp_path)
    recording._scales = {1: np.array(0.5), 2: np.array(0.25)}
    assert [recording._scale(step) for step in (1, 2, 2)] == [0.5, 0.25, 1.0]


@pytest.mark.parametrize(("evaluation", "writes"), [(None, False), ([0], True)])
def test_callbacks_see_the_run_as_it_is(evaluation, writes, tmp_path, monkeypatch):
    monkeypatch.setattr(run_context, "writes_text", lambda built: writes)
    monkeypatch.setattr(run_context, "metric_names", lambda step, batch: ["loss", "accuracy"])
    monkeypatch.setattr(run_context, "sample_text", lambda built, *given: given)
    config, splits = load_config(write_config(tmp_path)), SimpleNamespace(train=range(90), evaluation=evaluation)
    built = SimpleNamespace(config=config, splits=splits, step=None, batch=None)
    run = run_context.run_for_callbacks(built, tmp_path, start=4, can_scale=writes, say=print, left_out=(2,))
    assert (run.folder, run.start, run.num_steps, run.batch, run.examples) == (tmp_path, 4, 12, 16, 90)
    assert (run.left_out, run.evaluates, run.can_scale, run.say) == ((2,), writes, writes, print)
    assert (run.metrics(), run.config["train"]["steps"]) == (["eval_loss", "eval_accuracy"], 12)
    run.state = SimpleNamespace(params="weights")
    assert (run.generate and run.generate("a", 5, 0.5)) == (("weights", "a", 5, 0.5) if writes else None)


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


CONFIG = TransformerConfig(layers=2, width=16, heads=2, vocabulary=50, length=32)


@pytest.fixture
def buckets():
    sizes = [8] * 30 + [32] * 10
    return bucket_by_length(from_dataset([(np.arange(size),) * 2 for size in sizes]), lengths=[8, 32]).train


def test_buckets_count_as_long_as_they_were(buckets):
    """Three of four batches are of length 8, to within one at every moment."""
    flops = FlopsOfSteps(transformer(CONFIG), buckets, 4)
    short, long = (CONFIG.flops_of_length(length) * 4 for length in (8, 32))
    assert long > 4 * short
    assert flops(0, 4) == pytest.approx((3 * short + long) / 4)
    assert flops(8, 12) == flops(0, 4)
    each = {flops(number, number + 1) for number in range(4)}
    assert each == {short, long}
    assert flops(4, 4) == CONFIG.flops_per_row * 4, "no step to count"


def test_batches_that_are_left_out_do_not_count(buckets):
    """The third step gets the batch of the fourth, and so on."""
    everything = FlopsOfSteps(transformer(CONFIG), buckets, 4)
    flops = FlopsOfSteps(transformer(CONFIG), buckets, 4, left_out=(2,))
    found = [flops(number, number + 1) for number in range(6)]
    assert found == [everything(number, number + 1) for number in (0, 1, 3, 4, 5, 6)]
    assert found != [everything(number, number + 1) for number in range(6)]
    assert flops(0, 6) == pytest.approx(sum(found) / 6)


def test_other_sources_count_as_the_longest():
    flops = FlopsOfSteps(transformer(CONFIG), from_dataset([(np.arange(32),) * 2] * 8).train, 4)
    assert flops(3, 5) == CONFIG.flops_per_row * 4
