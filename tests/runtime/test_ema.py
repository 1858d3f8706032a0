"""A run that keeps an average of its parameters: evaluated, resumed, loaded, exported; one that keeps none says so."""

import json

import numpy as np
import pytest
from spmdkit.configs.load import load_config
from spmdkit.layouts.paths import leaves_with_paths
from spmdkit.mesh.errors import UserError
from spmdkit.runtime.build_run import build
from support.runs import assert_same_arrays, metrics, state_arrays, train, write_config

import spmdkit

EMA = {"learning_rate": 0.05, "ema": {"decay": 0.9, "evaluate": True}}


@pytest.mark.slow
def test_a_run_goes_on_and_its_averages_are_what_is_evaluated(tmp_path, cli):
    whole, halves = (write_config(tmp_path / name, optimizer=EMA) for name in ("whole", "halves"))
    assert "Evaluations are of the averages of the parameters (optimizer.ema.evaluate)." in cli(0, "train", whole).out
    cli(0, "train", halves, "train.steps=6")
    cli(0, "train", halves)
    arrays = state_arrays(whole, 12)
    assert_same_arrays(state_arrays(halves, 12), arrays)
    assert int(arrays["opt_state/updates"]) == 12

    folder = tmp_path / "whole" / "run"
    run = spmdkit.load_run(folder, ema=True)
    assert "(averages, optimizer.ema)" in repr(run)
    for path, leaf in leaves_with_paths(run.params):
        np.testing.assert_array_equal(leaf, arrays[f"opt_state/average/{path}"])
    last = metrics(folder)[-1]["eval_loss"]
    assert run.evaluate(max_batches=2)["loss"] == pytest.approx(last, rel=1e-6)
    assert spmdkit.load_run(folder).evaluate(max_batches=2)["loss"] != pytest.approx(last, rel=1e-4)

    found = json.loads(cli(0, "evaluate", folder, "--ema", "--batches", "2", "--json").out)
    assert found["loss"] == pytest.approx(last, rel=1e-6)
    target = tmp_path / "averages"
    cli(0, "export", folder, target, "--ema")
    assert {path.relative_to(target).as_posix(): np.load(path).tobytes() for path in target.rglob("*.npy")} == {
        f"{path}.npy": np.asarray(leaf).tobytes() for path, leaf in leaves_with_paths(run.params)
    }
    cli(2, "export", folder, target, "--ema", "--whole-state", "--force")


@pytest.mark.slow
def test_a_run_without_averages(tmp_path, cli):
    config = write_config(tmp_path, train={"steps": 1, "global_batch": 16})
    train(config)
    assert "contains no averages of its parameters" in cli(2, "evaluate", tmp_path / "run", "--ema").err
    with pytest.raises(UserError, match=r"Omit --ema \(in Python ema=True\), or train with optimizer\.ema=") as caught:
        spmdkit.load_run(tmp_path / "run", ema=True)
    assert caught.value.__cause__ is None  # and not itself: who looks for a cause would not come to an end


def test_local_steps_are_refused(tmp_path):
    strategy = {"data": {"size": 8, "local_steps": 2}}
    config = write_config(tmp_path, strategy=strategy, optimizer={"ema": {"decay": 0.9}})
    with pytest.raises(UserError, match=r"optimizer\.ema\.decay=0\.9 with strategy\.data\.local_steps=2: each group's"):
        build(load_config(config))
