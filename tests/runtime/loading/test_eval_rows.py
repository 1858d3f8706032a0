"""How many rows an evaluation takes, and what is said where the log of the run took others."""

import dataclasses

import pytest
from spmdkit.configs.schema import Config, EvalConfig, TrainConfig
from spmdkit.runtime.loading.eval_rows import count_eval_rows, difference_from_log, logged_metrics, other_parameters


def log(batches, global_batch=16, averages=False):
    config = Config(eval=EvalConfig(batches=batches), train=TrainConfig(global_batch=global_batch))
    ema = dataclasses.replace(config.optimizer.ema, decay=0.9 if averages else 0.0, evaluate=averages)
    return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, ema=ema))


@pytest.mark.parametrize(
    ("batch", "batches", "logged", "said", "difference"),
    [
        (16, None, log(0), "all 100 rows, 7 batches of 16, as in the log of the run", ""),
        (16, 2, log(2), "32 of 100 rows, 2 batches of 16, as in the log of the run", ""),
        (16, 7, log(0), "all 100 rows, 7 batches of 16, as in the log of the run", ""),
        (16, None, log(9), "all 100 rows, 7 batches of 16, as in the log of the run", ""),
        (16, 1, None, "16 of 100 rows, 1 batch of 16", ""),
        (
            16,
            None,
            log(2),
            "all 100 rows, 7 batches of 16",
            "figures of 32 of them (eval.batches=2): --batches 2 takes",
        ),
        (
            32,
            None,
            log(2),
            "all 100 rows, 4 batches of 32",
            "figures of 32 of them (eval.batches=2): --batches 1 takes",
        ),
        (24, None, log(2), "all 100 rows, 5 batches of 24", "figures of 32 of them (eval.batches=2)."),
        (
            16,
            2,
            log(0),
            "32 of 100 rows, 2 batches of 16",
            "figures of all of them (eval.batches=0): leave out --batches",
        ),
    ],
)
def test_which_rows(batch, batches, logged, said, difference):
    extent = count_eval_rows(100, batch, batches, logged)
    assert str(extent) == said
    assert difference in extent.difference
    assert bool(extent.difference) == bool(difference)


@pytest.mark.parametrize(
    ("ema", "logged", "said"),
    [
        (False, None, ""),
        (True, None, ""),
        (False, log(0), ""),
        (True, log(0, averages=True), ""),
        (False, log(0, averages=True), "of the averages (optimizer.ema.evaluate): --ema takes these."),
        (True, log(0), "of the parameters themselves: leave out --ema for the same."),
    ],
)
def test_which_parameters(ema, logged, said):
    assert other_parameters(ema, logged).endswith(said)
    assert bool(other_parameters(ema, logged)) == bool(said)


def test_compares_an_evaluation_with_the_log(tmp_path):
    lines = ['{"step": 8, "loss": 1.0, "eval_loss": 3.62692, "eval_accuracy": null}', '{"step": 9, "loss": 1.0}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert logged_metrics(tmp_path, 8) == {"loss": 3.62692}
    assert logged_metrics(tmp_path, 9) == logged_metrics(tmp_path, 7) == logged_metrics(tmp_path / "none", 8) == {}
    logged = {"loss": 3.62692, "accuracy": 0.5}
    assert difference_from_log({"loss": 3.62692 * (1 + 1e-6), "accuracy": 0.5}, logged, "float32") == ""
    assert difference_from_log({"loss": 3.627, "accuracy": 0.5}, logged, "bfloat16") == ""
    found = difference_from_log({"loss": 3.60616, "accuracy": 0.5}, logged, "bfloat16")
    assert found.startswith("warning: the log of the run has other values")
    assert "loss 3.60616 here, 3.62692 in the log." in found
    assert difference_from_log({"loss": float("nan")}, logged, "float32")
