import subprocess
import sys
import time

import pytest
from spmdkit.launch import cli
from spmdkit.training.exits import USER_MISTAKE


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "spmdkit", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def printed_help(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as info:
        cli.main([*arguments, "--help"])
    assert info.value.code == 0
    return capsys.readouterr().out


def test_help_names_every_command(capsys):
    text = printed_help(capsys)
    for command in cli.COMMANDS:
        assert f"  {command.name:<10}{command.summary}" in text
    assert "spmdkit train quickstart" in text
    assert "75 stopped: try again" in text


@pytest.mark.parametrize("command", [command.name for command in cli.COMMANDS])
def test_help_of_a_command_teaches_by_example(command, capsys):
    text = printed_help(capsys, command)
    assert text.count(f"  spmdkit {command} ") >= 1
    assert ("train.steps=20" in text) == ("CONFIG" in text)


def test_help_is_quick_and_imports_no_jax():
    code = """if True:
        import sys
        from spmdkit.launch.cli import main
        try:
            main(["train", "--help"])
        except SystemExit:
            sys.exit("jax" in sys.modules)
    """
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=30)
    assert time.monotonic() - start < 5  # 0.1 s on an idle machine


def test_reference_of_all_keys(capsys):
    with pytest.raises(SystemExit) as info:
        cli.main(["train", "--help-config"])
    assert info.value.code == 0
    assert "\n  global_batch: 32" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [[], ["trian", "x"], ["train"], ["launch", "quickstart"], ["train", "x", "--on", "y"]]
)
def test_wrong_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as info:
        cli.main(arguments)
    assert info.value.code == USER_MISTAKE
    assert "usage: spmdkit" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["train"], ["explain"], ["verify"], ["launch", "--on", "local:2x4"]])
def test_a_bad_config_is_one_message(command, capsys):
    arguments = [*command, "quickstart", "train.stps=3", "model.layers=x"]
    assert cli.main(arguments) == USER_MISTAKE
    assert capsys.readouterr().err.splitlines() == [
        "error: 2 problems in preset quickstart:",
        "  override model.layers=x: model.layers must be a whole number, not 'x' (text).",
        "  override train.stps=3: train.stps is not a key. Did you mean train.steps?",
    ]


def test_a_bad_target_is_one_message(capsys):
    assert cli.main(["launch", "quickstart", "--on", "local:2"]) == USER_MISTAKE
    assert capsys.readouterr().err.startswith("error: --on 'local:2' is not a target; give local:PxD")


def test_options_may_stand_between_overrides(monkeypatch):
    seen = []
    command = cli.Command("launch", "", "", cli.add_launch, lambda arguments: seen.append(arguments) or 0)
    monkeypatch.setattr(cli, "COMMANDS", (command,))
    assert cli.main(["launch", "a", "x=1", "--on", "local:2x4", "y=2"]) == 0
    assert (seen[0].config, seen[0].overrides, seen[0].on) == ("a", ["x=1", "y=2"], "local:2x4")


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 75), (RuntimeError("x"), 1)])
def test_other_errors(error, code, monkeypatch, capsys):
    def fail(arguments):
        raise error

    monkeypatch.setattr(cli, "COMMANDS", (cli.Command("train", "", "", cli.add_train, fail),))
    assert cli.main(["train", "a"]) == code
    assert ("Traceback" in capsys.readouterr().err) == (code == 1)


@pytest.mark.slow
def test_as_a_module():
    ended = run("train", "quickstrat")
    assert ended.returncode == USER_MISTAKE
    assert ended.stderr.startswith("error: 1 problem in quickstrat:\n  there is no such file")
    assert "Traceback" not in ended.stderr
