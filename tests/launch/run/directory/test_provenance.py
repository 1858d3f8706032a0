"""What is told of a run that goes on with other data, another model or another optimizer."""

from pathlib import Path

import numpy as np
import pytest
from runs import listing, write_config
from spmdkit.launch.cli import main
from spmdkit.launch.run.directory.definition import Definition
from spmdkit.launch.run.directory.provenance import remarks
from user_code import edit, made_of


def test_what_comes_with_spmdkit_is_named_alone(tmp_path):
    found = made_of(write_config(tmp_path))
    assert (found.model, found.optimizer) == (Definition("mlp"), Definition("adamw"))
    assert len(found.fingerprint) == 16
    assert found.description.startswith("synthetic: 8,192 noisy images")


def told(config: Path, before, *overrides: str) -> list[str]:
    return remarks(before, made_of(config, *overrides), "synthetic", goes_on=True)


def test_nothing_changed(config):
    assert told(config, made_of(config)) == []
    assert told(config, made_of(config), "train.steps=99", "optimizer.learning_rate=0.5") == []


@pytest.mark.parametrize(
    ("old", "new"), [("import jax.numpy as jnp", "import jax.numpy as jnp  # as ever"), ("straight", "as_it_is")]
)
def test_a_changed_comment_or_name_is_a_remark(old, new, config):
    before = made_of(config)
    edit(config.parent / "layers_of_mine.py", old, new)
    (line,) = told(config, before)
    path = config.parent / "layers_of_mine.py"
    assert line == f"model.name=model_of_mine:make: {path} has changed since, but not what the loss computes."


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("layers_of_mine", "jnp.tanh", "jnp.sin"),
        ("layers_of_mine", 'params["v"][None, :]', '2 * params["v"][None, :]'),
        ("model_of_mine", "np.linspace(0, 1, 10)", "np.linspace(0, 2, 10)"),
    ],
)
def test_a_model_that_computes_something_else_is_a_warning(file, old, new, config):
    before = made_of(config)
    edit(config.parent / f"{file}.py", old, new)
    (line,) = told(config, before)
    assert line.startswith(
        "warning: model.name=model_of_mine:make computes another loss than when this run was made "
        f"({config.parent / file}.py has changed). What follows goes on from the old parameters with the new model."
    )
    assert "start anew with --fresh" in line


def test_a_package_that_changed_is_a_warning_too(config):
    before = made_of(config)
    before = before._replace(model=before.model._replace(program="0" * 16))
    (line,) = told(config, before)
    assert "(no file of it has changed, so a package that it uses has)" in line


def test_another_jax_compares_the_files_alone(config):
    before = made_of(config)._replace(jax="0.1")
    before = before._replace(model=before.model._replace(program="0" * 16))
    assert told(config, before) == []
    edit(config.parent / "layers_of_mine.py", "import jax.numpy as jnp", "import jax.numpy as jnp  # as ever")
    (line,) = told(config, before)
    assert "layers_of_mine.py has changed since this run was made, and may compute something else." in line


def test_another_optimizer_is_a_warning(config):
    before = made_of(config)
    path = config.parent / "optimizer_of_mine.py"
    edit(path, "import optax", "import optax  # as ever")
    assert told(config, before) == [
        f"optimizer.name=optimizer_of_mine:make: {path} has changed since, but not what the update computes."
    ]
    edit(path, "b1=0.9", "b1=0.8")
    (line,) = told(config, before)
    assert line.startswith(
        f"warning: optimizer.name=optimizer_of_mine:make: {path} has changed since this run was made"
    )


def test_an_optimizer_that_follows_the_loss(config):
    """Its update needs `value`, which a step gives: what it computes is known all the same."""
    plain = made_of(config).optimizer.program
    edit(config.parent / "optimizer_of_mine.py", "scale_by_learning_rate(learning_rate)", "contrib.reduce_on_plateau()")
    program = made_of(config).optimizer.program
    assert len(program) == 16
    assert program != plain


def test_an_optimizer_of_a_group_alone(config):
    group = "optimizer.groups={v: {name: 'optimizer_of_mine:make'}}"
    names = [made_of(config, f"optimizer.name={name}", group).optimizer.name for name in ("sgd", "lion")]
    assert names == ["optimizer_of_mine:make"] * 2


def test_data_that_cannot_be_told_apart_is_a_warning(config):
    now = made_of(config)._replace(fingerprint="")
    (line,) = remarks(None, now, "mine:splits", goes_on=False)
    assert line.startswith("warning: data.source=mine:splits gives no fingerprint: if its data changes, a run that")


def test_a_run_of_an_earlier_version_goes_on(config):
    (line,) = remarks(None, made_of(config), "synthetic", goes_on=True)
    assert line.startswith("There is no provenance.json from before")


def test_a_run_goes_on_with_its_own_data_alone(tmp_path, capsys):
    """Through the command: trained, its data changed, refused; set back, it goes on."""
    rows = {"inputs": np.ones((40, 64), np.float32), "targets": np.arange(40) % 10}
    data = {"source": "arrays", "files": [str(tmp_path / "rows.npz")], "eval_fraction": 0.0}
    np.savez(tmp_path / "rows.npz", **rows)
    config = write_config(tmp_path, data=data, train={"steps": 1, "global_batch": 16})
    assert main(["train", str(config)]) == 0
    np.savez(tmp_path / "rows.npz", **{**rows, "targets": np.roll(rows["targets"], 1)})
    before = listing(tmp_path / "run")
    assert main(["train", str(config), "train.steps=2"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path / 'run'} holds a run on other data: ")
    assert listing(tmp_path / "run") == before
    np.savez(tmp_path / "rows.npz", **rows)
    (tmp_path / "run" / "provenance.json").unlink()
    assert main(["train", str(config), "train.steps=2"]) == 0
    out = capsys.readouterr().out
    assert "There is no provenance.json from before" in out
    assert "at step 1 of 2." in out
    assert (tmp_path / "run" / "provenance.json").is_file()
