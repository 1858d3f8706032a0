"""The rows, parameters and values of an evaluation against those in the log of the run."""

import dataclasses
from types import SimpleNamespace

import pytest
from spmdkit.configs import load_config
from spmdkit.configs.schema import EvalConfig
from spmdkit.runtime.loading.loaded_run import compare_with_log
from support.runs import write_config

LINES = ['{"step": 8, "loss": 1.0, "eval_loss": 3.62692, "eval_accuracy": null}', '{"step": 9, "loss": 1.0}']
SAME = {"loss": 3.62692}


def loaded(folder, logged=0, *, batch=16, ema=False, averages=False, step=8, compute="float32"):
    """A loaded run whose training evaluated `logged` batches of 16 rows, and what its log says."""
    averaged = {"name": "sgd", "learning_rate": 0.1, "ema": {"decay": 0.9, "evaluate": averages}}
    path = write_config(folder, eval={"every": 4, "batches": logged}, optimizer=averaged)
    path.rename(folder / "config.yaml")
    (folder / "metrics.jsonl").write_text("\n".join(LINES) + "\n")
    config = load_config(folder / "config.yaml", [f"precision.compute={compute}"], sizes=False)
    return SimpleNamespace(folder=folder, config=config, batch_rows=batch, ema=ema, step=step)


@pytest.mark.parametrize(
    ("options", "batches", "rows", "remark"),
    [
        ({}, None, (100, 100), ""),
        ({"logged": 2}, 2, (32, 32), ""),
        ({"batch": 32}, 7, (100, 100), ""),
        ({"logged": 9}, None, (100, 100), ""),
        ({"logged": 2}, None, (100, 32), "is of 32 rows (eval.batches=2); --batches selects how many."),
        ({}, 2, (32, 100), "is of 100 rows (eval.batches=0); --batches selects how many."),
        ({"ema": True, "averages": True}, None, (100, 100), ""),
        ({"averages": True}, None, (100, 100), "of the averages (optimizer.ema.evaluate): use --ema for the same."),
        ({"ema": True}, None, (100, 100), "of the parameters themselves: omit --ema for the same."),
    ],
)
def test_compares_only_the_same_rows_and_parameters(options, batches, rows, remark, tmp_path):
    found = compare_with_log(loaded(tmp_path, **options), 100, batches, SAME)
    assert (found.rows, found.log_rows) == rows
    assert found.remark.endswith(remark)
    assert bool(found.remark) == bool(remark)
    assert found.logged == ({} if remark else SAME)


@pytest.mark.parametrize(
    ("loss", "compute", "differs"),
    [
        (3.62692 * (1 + 1e-6), "float32", False),
        (3.627, "bfloat16", False),
        (3.60616, "bfloat16", True),
        (float("nan"), "float32", True),
    ],
)
def test_warns_of_other_values(loss, compute, differs, tmp_path):
    found = compare_with_log(loaded(tmp_path, compute=compute), 100, None, {"loss": loss})
    assert bool(found.warning) == differs
    if differs:
        assert f"loss {loss:.6g} here, 3.62692 in the log." in found.warning


def test_compares_nothing_with_other_data_or_steps(tmp_path):
    run = loaded(tmp_path)
    assert compare_with_log(loaded(tmp_path, step=9), 100, None, SAME).logged == {}
    data = dataclasses.replace(run.config.data, eval_fraction=0.5)
    elsewhere = dataclasses.replace(run.config.run, root="/elsewhere")
    for changes in ({"data": data}, {"run": elsewhere}):
        other = SimpleNamespace(**{**vars(run), "config": dataclasses.replace(run.config, **changes)})
        assert compare_with_log(other, 100, None, SAME) == (100, None, {}, "", "")
    fewer = SimpleNamespace(**{**vars(run), "config": dataclasses.replace(run.config, eval=EvalConfig(batches=2))})
    assert compare_with_log(fewer, 100, None, SAME).logged == SAME, "the log follows the config of the run itself"
    (tmp_path / "config.yaml").write_text("\t{")
    assert compare_with_log(run, 100, None, SAME).logged == {}
    (tmp_path / "config.yaml").unlink()
    assert compare_with_log(run, 100, None, SAME).log_rows is None
