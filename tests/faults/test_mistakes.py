"""What a user gets wrong is one clean message and exit code 2; nothing is left behind."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from runs import environment, write_config
from spmdkit.launch.cli import main
from spmdkit.training.ending.exits import USER_MISTAKE

FROM_THE_CONFIG = {
    "an unknown key": (["train.stps=3"], "train.stps is not a key. Did you mean train.steps?"),
    "sizes that do not multiply out": (["strategy={fsdp: 3}"], "run.simulate=8 gives 8 devices: 3 != 8"),
    "a batch that cannot be split": (["train.global_batch=12"], "12 rows cannot be split evenly"),
    "a strategy that there is not": (["strategy={fdsp: 8}"], "Did you mean strategy.fsdp?"),
    "an impossible size of the model": (["model={name: transformer, width: 6, heads: 4}"], "model.width=6"),
    "files that there are not": (["data={source: text, files: [nowhere/*.txt]}"], "nowhere/*.txt"),
    "a module that there is not": (["model={name: 'nowhere:model'}"], "nowhere"),
    "classes that nobody tells": (["model.classes=0"], "model.classes is not given"),
}
FROM_THE_LAYOUTS = {
    "a dim that cannot be split": (
        ["model.widths=[30]", "layouts={rules: {layers/0/kernel: [null, fsdp]}}"],
        "layers/0/kernel",
    ),
    "a rule for nothing": (["layouts={rules: {layers/7/kernel: [fsdp, null]}}"], "layers/7/kernel"),
    "devices that there are not": (
        ["run.simulate=0", "strategy={fsdp: 3}", "train.global_batch=24"],
        "strategy: fsdp 3, but there are 8 devices: 3 != 8. Set strategy.fsdp=8",
    ),
    "a batch that the devices cannot split": (
        ["run.simulate=0", "strategy={fsdp: -1}", "train.global_batch=12"],
        "train.global_batch=12 rows cannot be split evenly: strategy.fsdp 8",
    ),
}


def assert_one_message(err: str, text: str) -> None:
    assert err.startswith("error: ")
    assert text in err
    assert "Traceback" not in err


@pytest.mark.parametrize("command", ["train", "explain"])
@pytest.mark.parametrize("name", [*FROM_THE_CONFIG, *FROM_THE_LAYOUTS])
def test_a_mistake_is_one_message(name, command, tmp_path, capsys):
    overrides, text = {**FROM_THE_CONFIG, **FROM_THE_LAYOUTS}[name]
    assert main([command, str(write_config(tmp_path)), *overrides]) == USER_MISTAKE
    assert_one_message(capsys.readouterr().err, text)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("quikstart", "nor a preset of that name. Did you mean quickstart?"),
        ("nowhere/mine.yaml", "there is no such file"),
    ],
)
@pytest.mark.parametrize("command", [["train"], ["explain"], ["launch", "--on", "local:2x4"]])
def test_a_config_that_there_is_not(command, source, text, capsys):
    assert main([*command, source]) == USER_MISTAKE
    assert_one_message(capsys.readouterr().err, text)


@pytest.mark.parametrize("command", [["train"], ["launch", "--on", "local:2x4"]])
def test_a_file_where_the_folder_should_be(command, tmp_path, capsys):
    config = write_config(tmp_path)
    (tmp_path / "run").write_text("mine")
    assert main([*command, str(config)]) == USER_MISTAKE
    assert_one_message(capsys.readouterr().err.partition("\n")[0], "of run.dir cannot be made: ")
    assert (tmp_path / "run").read_text() == "mine"


def test_another_run_in_the_folder(tmp_path, capsys):
    config = write_config(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("run: {seed: 5}")
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    assert main(["train", str(config)]) == USER_MISTAKE
    assert_one_message(capsys.readouterr().err, "  run.seed: 5 there, 0 here (")


@pytest.mark.slow
def test_no_device_is_touched_where_the_config_tells(tmp_path):
    code = """if True:
        import json, sys
        from spmdkit.launch.cli import main
        from spmdkit.mesh.simulate import backend_started
        for arguments in json.loads(sys.argv[1]):
            assert main(arguments) == 2, arguments
            assert not backend_started(), arguments
    """
    config = str(write_config(tmp_path))
    cases = [["train", config, *overrides] for overrides, _ in FROM_THE_CONFIG.values()]
    ended = subprocess.run(
        [sys.executable, "-c", code, json.dumps(cases)], env=environment(), capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    assert not Path(tmp_path / "run").exists()
