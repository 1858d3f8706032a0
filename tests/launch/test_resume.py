"""Which folders a run may go on in."""

import dataclasses
from pathlib import Path

import pytest
import yaml
from runs import listing, write_config, write_language_config
from spmdkit.configs import load_config
from spmdkit.launch.resume import adopt_folder
from spmdkit.launch.resume import write_config as write_resolved


@pytest.fixture
def config(tmp_path) -> Path:
    """The file of a run whose folder exists."""
    path = write_config(tmp_path)
    loaded = load_config(path)
    write_resolved(loaded, adopt_folder(loaded))
    return path


def test_a_new_folder_is_taken_without_writing(tmp_path):
    loaded = load_config(write_config(tmp_path))
    assert adopt_folder(loaded) == tmp_path / "run"
    assert not (tmp_path / "run").exists()


def test_the_whole_config_is_written(config):
    written = yaml.safe_load((config.parent / "run" / "config.yaml").read_text())
    assert written["train"]["remat"] == "none"
    assert written["model"] == {"name": "mlp", "features": 0, "classes": 10, "widths": [32]}
    assert [path.name for path in (config.parent / "run").iterdir()] == ["config.yaml"]


def test_the_same_run_may_go_on(config):
    before = listing(config.parent)
    assert adopt_folder(load_config(config)) == config.parent / "run"
    assert listing(config.parent) == before


def test_every_kind_of_value_is_the_same_when_read_back(tmp_path):
    loaded = load_config(
        write_language_config(tmp_path),
        ["model.rope_base=1e4", "model.norm_epsilon=1e-6", "model.tied=true", "data.column='1e3'", "data.dtype=''"],
    )
    write_resolved(loaded, adopt_folder(loaded))
    adopt_folder(loaded)


@pytest.mark.parametrize(
    "override",
    [
        "strategy={data: 8}",
        "strategy.fsdp.floor_bytes=1",
        "train.steps=99",
        "train.accumulate=2",
        "train.remat=full",
        "run.simulate=16",
        "run.log_every=5",
        "eval.every=0",
        "checkpoint.every=2",
        "optimizer.learning_rate=0.5",
        "precision.compute=bfloat16",
        "data.prefetch=0",
        "data.threads=2",
        "timeouts.heartbeat=99",
    ],
)
def test_what_may_change(config, override):
    strategy = [] if override != "run.simulate=16" else ["strategy={data: 16}"]
    adopt_folder(load_config(config, [override, *strategy]))


def test_what_may_not_is_listed_completely(config):
    changes = [
        "model.widths=[32, 32]",
        "data.eval_fraction=0.1",
        "data.shuffle=false",
        "run.seed=1",
        "train.global_batch=32",
        "optimizer.name=lion",
        "precision.params=bfloat16",
        "train.steps=20",
    ]
    before = listing(config.parent)
    with pytest.raises(ValueError, match="cannot change halfway") as info:
        adopt_folder(load_config(config, changes))
    lines = str(info.value).splitlines()
    assert lines[0].startswith(f"{config.parent / 'run'} holds a run that differs from this one")
    assert lines[1:-1] == [
        "  data.eval_fraction: 0.05 then, 0.1 now",
        "  data.shuffle: True then, False now",
        "  model.widths: [32] then, [32, 32] now",
        "  optimizer.name: 'adamw' then, 'lion' now",
        "  precision.params: 'float32' then, 'bfloat16' now",
        "  run.seed: 0 then, 1 now",
        "  train.global_batch: 16 then, 32 now",
    ]
    assert lines[-1] == "Set these back to go on with it, or choose another run.dir to start anew."
    assert listing(config.parent) == before


def test_another_model_with_other_options(config):
    loaded = load_config(config)
    other = dataclasses.replace(loaded, model={"name": "own:model", "hidden": 3})
    with pytest.raises(
        ValueError, match=r"model\.hidden: None then, 3 now\n  model\.name: 'mlp' then, 'own:model' now"
    ):
        adopt_folder(other)
