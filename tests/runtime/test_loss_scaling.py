"""Runs in float16: the scale is saved, goes on bit for bit, on another mesh too, and a run that never fits ends."""

from types import SimpleNamespace

import pytest
from spmdkit.configs.load import load_config
from spmdkit.parallel.step.loss_scaling import MAX_CONSECUTIVE_SKIPS
from spmdkit.runtime.training_run import TrainingRun
from support.runs import metrics, state_arrays, train, write_config

HALF = {"compute": "float16", "loss_scale_initial": 2.0**18, "loss_scale_interval": 2}
"""Overflows at first: the first updates are left out; then the scale grows, and now and then overflows again."""
CONSTANT = {"learning_rate": 0.01}


@pytest.mark.long
@pytest.mark.slow
def test_a_scaled_run_goes_on_bit_for_bit(tmp_path, capsys):
    sections = {"precision": HALF, "optimizer": CONSTANT}
    whole, halves = (write_config(tmp_path / name, **sections) for name in ("whole", "halves"))
    train(whole)
    assert "its update was left out (precision.loss_scale, which halves)" in capsys.readouterr().out
    train(halves, "train.steps=6")
    train(halves)
    found, expected = (state_arrays(config, 12) for config in (halves, whole))
    assert {"loss_scale/scale", "loss_scale/good_steps"} < set(found)
    assert all((found[path] == expected[path]).all() for path in expected)
    records = metrics(tmp_path / "whole" / "run")
    assert records[-1]["skipped"] >= 1
    assert all(record["loss_scale"] < 2.0**18 for record in records)  # the first was left out, and not logged
    assert {record["step"]: record["loss_scale"] for record in records}.items() >= {
        record["step"]: record["loss_scale"] for record in metrics(tmp_path / "halves" / "run")
    }.items()
    scale = float(expected["loss_scale/scale"])
    train(whole, "strategy={data: 8}", "train.steps=13")
    assert "Step 13: the loss is" in capsys.readouterr().out  # it overflows, on that mesh too
    assert float(state_arrays(whole, 13)["loss_scale/scale"]) == scale / 2


@pytest.mark.slow
def test_a_run_without_a_single_update_has_no_report(tmp_path, capsys):
    """Too short to come down to a scale that fits."""
    precision = {"compute": "float16", "loss_scale_initial": 2.0**24}
    config = write_config(tmp_path, precision=precision, train={"steps": 2, "global_batch": 16})
    train(config)
    assert "The update of every step was left out: there is nothing to report" in capsys.readouterr().out
    assert not (tmp_path / "run" / "report.html").exists()


def test_how_many_updates_in_a_row_may_be_left_out(tmp_path):
    def allowed(**sections):
        config = load_config(write_config(tmp_path, **sections))
        return TrainingRun.max_skipped.fget(SimpleNamespace(config=config))

    assert allowed() == 0
    skips = {"not_finite": "skip", "most_not_finite": 3, "steps": 4, "global_batch": 16}
    assert allowed(train=skips) == 3
    assert allowed(precision={"compute": "float16"}, train=skips) == MAX_CONSECUTIVE_SKIPS == 40
    assert allowed(precision={"compute": "float16", "loss_scale": 512}) == 0
