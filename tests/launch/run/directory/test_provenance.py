"""What is told of a run that goes on with other data, another model or another optimizer."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from runs import environment, listing, write_config
from spmdkit.configs import load_config
from spmdkit.launch.cli import main
from spmdkit.launch.run.build import build
from spmdkit.launch.run.directory.provenance import Definition, provenance, remarks

MODEL = """
import jax, jax.numpy as jnp
import numpy as np
import layers_of_mine
from spmdkit.models.layers.cross_entropy import cross_entropy
from spmdkit.parallel import Model
TABLE = np.linspace(0, 1, 10).astype(np.float32)

def init(key):
    return {"w": 0.1 * jax.random.normal(key, (64, 10)), "v": jnp.zeros(10)}

def loss(params, batch, key):
    return cross_entropy(layers_of_mine.logits(params, batch) + TABLE[None, :], batch["targets"], batch["weights"])

def make():
    return Model(init=init, loss=loss)
"""
LAYERS = """
import jax
import jax.numpy as jnp

@jax.custom_vjp
def straight(x):
    return jnp.round(x, 2)

straight.defvjp(lambda x: (straight(x), None), lambda _, gradient: (gradient,))

def tanh(x):
    return jnp.tanh(x)

def logits(params, batch):
    policy = jax.checkpoint_policies.dots_saveable  # the trace shows its address
    return straight(jax.checkpoint(tanh, policy=policy)(batch["inputs"] @ params["w"] + params["v"][None, :]))
"""
OPTIMIZER = """
import optax

def make(learning_rate):
    return optax.chain(optax.scale_by_adam(b1=0.9), optax.scale_by_learning_rate(learning_rate))
"""
OWN = ("model_of_mine", "layers_of_mine", "optimizer_of_mine")


@pytest.fixture
def config(tmp_path, monkeypatch) -> Path:
    for name, text in zip(OWN, (MODEL, LAYERS, OPTIMIZER), strict=True):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "stranger.py").write_text("import os")
    monkeypatch.syspath_prepend(tmp_path)
    return write_config(
        tmp_path,
        model={"name": "model_of_mine:make"},
        optimizer={"name": "optimizer_of_mine:make", "learning_rate": 0.01},
        strategy={"data": 8},
    )


def made_of(config: Path, *overrides: str):
    """What a run is made of, its modules imported anew."""
    for name in OWN:
        sys.modules.pop(name, None)
    return provenance(build(load_config(config, overrides)))


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_what_comes_with_spmdkit_is_named_alone(tmp_path):
    found = made_of(write_config(tmp_path))
    assert (found.model, found.optimizer) == (Definition("mlp"), Definition("adamw"))
    assert len(found.fingerprint) == 16
    assert found.description.startswith("synthetic: 8,192 noisy images")


def test_the_users_own_files_are_those_beside_the_module_that_it_imports(config):
    found = made_of(config)
    assert {name: Path(path).name for name, (path, _) in found.model.files.items()} == {
        "layers_of_mine": "layers_of_mine.py",
        "model_of_mine": "model_of_mine.py",
    }
    assert list(found.optimizer.files) == ["optimizer_of_mine"]
    assert len(found.model.program) == len(found.optimizer.program) == 16


def test_the_same_source_gives_the_same_in_another_process(config):
    code = """if True:
        import sys
        sys.path.insert(0, sys.argv[2])
        from spmdkit.configs import load_config
        from spmdkit.launch.run.build import build, prepare_devices
        from spmdkit.launch.run.directory.provenance import as_json, provenance
        config = load_config(sys.argv[1], sys.argv[3:])
        prepare_devices(config)
        print(as_json(provenance(build(config))))
    """
    changed = ["strategy={fsdp: {size: 4, floor_bytes: 64}}", "run.simulate=4", "train.accumulate=2"]
    command = [sys.executable, "-c", code, str(config), str(config.parent), *changed, "precision.compute=bfloat16"]
    ended = subprocess.run(command, env=environment(PYTHONHASHSEED="7"), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    other, here = json.loads(ended.stdout), made_of(config)
    assert other["fingerprint"] == here.fingerprint
    assert other["model"]["program"] == here.model.program
    assert other["optimizer"]["program"] == here.optimizer.program
    assert other["model"]["files"] == {name: list(file) for name, file in here.model.files.items()}


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
