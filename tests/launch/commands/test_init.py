"""`spmdkit init`: what it prints is a config that loads, and a preset as it stands."""

import pytest
from spmdkit.configs import load_config
from spmdkit.configs.presets import preset_text
from spmdkit.launch.cli import main
from spmdkit.training.ending.exits import USER_MISTAKE


def test_a_config_to_begin_with(tmp_path, capsys):
    """The file that the redirection of the example makes."""
    assert main(["init"]) == 0
    path = tmp_path / "my.yaml"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    config = load_config(path)
    assert config.model["name"]
    for section in ("strategy:", "model:", "data:", "optimizer:"):
        assert any(line.startswith(section) for line in path.read_text(encoding="utf-8").splitlines())


def test_a_preset(capsys):
    assert main(["init", "hsdp"]) == 0
    printed = capsys.readouterr().out
    assert printed == preset_text("hsdp")
    assert "fsdp" in printed


def test_a_preset_that_there_is_not(capsys):
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main(["init", "fsdpp"]))
    assert ended.value.code == USER_MISTAKE
    out, err = capsys.readouterr()
    assert out == ""
    assert "fsdp" in err
    assert "Traceback" not in err
