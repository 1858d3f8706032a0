"""`spmdkit export` as it is typed."""

import numpy as np
import pytest
from spmdkit.launch.cli import main
from spmdkit.launch.commands.export import KINDS, LORA
from spmdkit.launch.inspection import export as export_file

import spmdkit


def test_the_parameters_of_a_step(untrained, tmp_path, capsys):
    words = [str(untrained.parent / "run"), str(tmp_path / "model"), "--to", "npy", "--step", "4"]
    assert main(["export", *words]) == 0
    assert capsys.readouterr().out == f"Wrote {tmp_path / 'model'}: 4 arrays, 9.4 KiB.\n"
    run = spmdkit.load_run(untrained.parent / "run", step=4, mesh={})
    np.testing.assert_array_equal(
        np.load(tmp_path / "model" / "layers/0/kernel.npy"), run.params["layers"][0]["kernel"]
    )


@pytest.mark.parametrize(("kind", "name"), [("safetensors", "a.safetensors"), ("npy", "a"), (None, "b.safetensors")])
def test_every_kind(kind, name, untrained, tmp_path):
    words = [str(untrained), str(tmp_path / name.partition(".")[0] if kind else tmp_path / name)]
    assert main(["export", *words, *(["--to", kind] if kind else [])]) == 0
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_name_of_another_kind(untrained, tmp_path, capsys):
    words = [str(untrained.parent / "run"), str(tmp_path / "model.bin")]
    assert main(["export", *words, "--to", "safetensors"]) == 2
    assert "model.bin: a name of that kind has .safetensors. Leave --to out, or rename it." in capsys.readouterr().err
    assert main(["export", *words, "--to", "npy"]) == 2
    assert "a name of that kind has no ending: it is a folder." in capsys.readouterr().err


def test_values_are_laid_over_a_config_and_nothing_else(untrained, tmp_path, capsys):
    """A folder says all by itself: where no config is read, what is laid over it would be lost without a word."""
    target, run = tmp_path / "model.safetensors", untrained.parent / "run"
    assert main(["export", str(untrained), str(target), f"run.dir={run}"]) == 0
    assert main(["export", str(untrained), str(tmp_path / "b.safetensors"), f"run.dir={tmp_path}/none"]) == 2
    assert "says run.dir=" in capsys.readouterr().err
    assert main(["export", str(run), str(tmp_path / "c.safetensors"), "run.simulate=0"]) == 2
    told = "error: run.simulate=0: spmdkit export of a folder reads no config, so key=value changes nothing."
    assert capsys.readouterr().err.startswith(f"{told} Leave it out, or give --to hugging_face.")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors"]


@pytest.mark.parametrize(
    "extra", [("model.safetensors",), ("b.safetensors", "trian.steps=5"), ("b.safetensors", "run.simulate=0"), ("",)]
)
def test_a_word_too_many_after_a_folder_is_not_dropped(extra, untrained, tmp_path, capsys):
    """As of a name with a space and no quotes."""
    assert main(["export", str(untrained.parent / "run"), str(tmp_path / "my"), *extra]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: run.simulate=0: spmdkit export of" if "run.simulate=0" in extra else "error: ")
    assert "run.simulate=0" in extra or f"takes RUN and FILE, and there is more: {extra[0]!r}" in said
    assert list(tmp_path.iterdir()) == []


def test_the_help_names_every_kind():
    assert set(KINDS) == set(export_file.KINDS)
    assert LORA == export_file.ADAPTERS
