"""The command line: help texts, arguments, suggestions, exit codes."""

import io
import json
import re
import shlex
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from spmdkit.configs import load_config
from spmdkit.configs.config_sources import preset_names, preset_text
from spmdkit.launch import cli as command_line
from spmdkit.launch.commands import run_commands
from spmdkit.launch.launchers import LAUNCHERS
from spmdkit.mesh.exit_codes import INVALID_INPUT

import spmdkit


@pytest.fixture
def exits(capsys):
    """Runs a command that argparse ends with this code; returns what it printed."""

    def run(code, *words):
        with pytest.raises(SystemExit) as info:
            command_line.main([*words])
        assert info.value.code == code
        return capsys.readouterr()

    return run


def test_help_shows_an_example_of_every_command(exits):
    text = exits(0, "--help").out
    for command in command_line.COMMANDS:
        assert f"\n  {command.example}\n      {command.summary}\n" in text
    assert "spmdkit train quickstart" in text
    assert "75 stopped:\ntry again" in text
    assert max(map(len, text.partition("options:")[0].splitlines())) <= 80


URL = "gs://bucket/x"


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["train", URL], "argument config"),
        (["evaluate", URL], "argument place"),
        (["export", "runs/one", URL], "argument target"),
        (["predict", "runs/one", "--out", URL], "argument out"),
        (["report", "runs/one", URL], "argument runs"),
        (["report", "runs/one", "--out", URL], "argument out"),
        (["checkpoint", "inspect", URL], "argument place"),
        (["schedule", URL], "argument name"),
        (["schedule", "1f1b", "--svg", URL], "argument svg"),
        (["schedule", "1f1b", "--csv", URL], "argument csv"),
        (["plan", "quickstart", "--target", "h100:1x8", "--html", URL], "argument --html"),
        (["explain", "quickstart", "--hlo", URL], "argument --hlo"),
    ],
)
def test_rejects_urls_as_paths(words, name, exits, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert re.search(rf"{name}: .*must be a path on a mounted file system", exits(INVALID_INPUT, *words).err)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [["run.dir=gs://bucket/x"], ["data.source=text", "data.files=[s3://bucket/x]"]])
def test_a_run_in_a_bucket_does_not_start(words, cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "on a mounted file system" in cli(INVALID_INPUT, "train", "quickstart", *words).err
    assert not list(tmp_path.iterdir())


def test_a_hosts_file_is_not_a_url(cli):
    assert "The hosts file must be a path" in cli(INVALID_INPUT, "launch", "quickstart", "--on", f"ssh:{URL}").err


@pytest.mark.parametrize("arguments", [[], ["help"]])
def test_no_command_prints_help(arguments, cli, exits):
    assert cli(0, *arguments).out == exits(0, "--help").out


@pytest.mark.parametrize("command", command_line.COMMANDS, ids=lambda command: command.name)
def test_examples_parse(command):
    words = shlex.split(command.example.partition(" > ")[0])
    assert words[:2] == ["spmdkit", command.name]
    command_line.parse_arguments(command, words[2:])


@pytest.mark.parametrize("is_process", [True, False])
def test_handles_signals_until_the_end_of_its_own_process(is_process, tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(command_line, "ends_on_signals", lambda **options: given.append(options) or nullcontext())
    words = ["train", str(tmp_path / "missing.yaml")]
    monkeypatch.setattr(sys, "argv", ["spmdkit", *words])
    assert command_line.main(None if is_process else words) == INVALID_INPUT
    assert given == [{"until_the_end": is_process}]


def test_version_prints_all_versions(exits):
    expected = rf"spmdkit {re.escape(spmdkit.__version__)}, jax [\d.]+, jaxlib [\d.]+, Python 3[\d.]+\n"
    assert re.fullmatch(expected, exits(0, "--version").out)


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("--list", f"\n  {preset_names()[0]} "),
        ("--help-config", "\n  global_batch: 32"),
        ("--help-restart", "train.steps"),
    ],
)
def test_options_of_train_print_a_text_without_a_config(option, text, exits):
    assert text in exits(0, "train", option).out


def test_init_prints_a_config_whose_comments_are_valid_keys(tmp_path, cli):
    text = cli(0, "init").out
    (tmp_path / "my.yaml").write_text(text)
    assert load_config(tmp_path / "my.yaml").strategy["data"].size == -1
    text = re.sub(r"^  # (\w+: )", r"  \1", text, flags=re.MULTILINE)
    (tmp_path / "my.yaml").write_text(text.replace("fsdp: 4", "fsdp: 1"))
    config = load_config(tmp_path / "my.yaml", ["data.source=text"])
    assert set(config.strategy) == {"data", "fsdp", "tensor", "context", "pipe"}
    assert config.data.files == ("corpus/**/*.txt",)
    assert cli(0, "init", "hsdp").out == preset_text("hsdp")


@pytest.mark.parametrize("command", [command.name for command in command_line.COMMANDS])
def test_help_has_examples(command, exits):
    text = exits(0, command, "--help").out
    assert text.count(f"  spmdkit {command} ") >= 1
    assert ("key=value arguments override" in text) == ("[key=value ...]" in text)


def test_help_does_not_import_jax():
    code = """if True:
        import sys
        from spmdkit.launch.cli import main
        try:
            main(["train", "--help"])
        except SystemExit:
            sys.exit("jax" in sys.modules)
    """
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=30)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian", "x"], "error: unknown command 'trian'; did you mean train?"),
        (["my.yaml", "train.steps=3"], "error: unknown command 'my.yaml'; to train it: spmdkit train my.yaml\n"),
        (["quickstart"], "to train it: spmdkit train quickstart\n"),
        (["deploy"], "error: unknown command 'deploy'; the commands are init, schema, train, "),
        (["train"], "error: the following arguments are required: CONFIG\n"),
        (["train", "a", "--steps", "3"], "key=value: train.steps=...\n"),
        (["train", "a", "--steps=3", "--zzzqqq"], "key=value: train.steps=...\n  unrecognized arguments: --zzzqqq\n"),
        (["verify", "a", "--lr", "3e-4", "--steps", "2"], "key=value: optimizer.learning_rate=...\n"),
        (["explain", "a", "--ddp", "8"], "key=value: strategy.data=...\n"),
        (["train", "a", "--batch-size", "3"], "key=value: train.global_batch=... It counts the rows of a step over"),
        (["schedule", "1f1b", "--steps", "3"], "error: unrecognized arguments: --steps 3\n"),
        (["evaluate", "runs/a", "--jsson"], "error: --jsson is not an option; did you mean --json?\n"),
        (["evaluate", "runs/a", "--steps", "8"], "error: --steps is not an option; did you mean --step?\n"),
        (["evaluate", "runs/a", "--simulate", "1"], "key=value: run.simulate=...\n"),
        (["checkpoint", "verify", "runs/a", "run.simulate=1"], "error: unrecognized arguments: run.simulate=1\n"),
    ],
)
def test_suggests_keys_options_and_commands(arguments, message, exits):
    assert message in exits(INVALID_INPUT, *arguments).err


@pytest.mark.parametrize(
    "option", ["explain x --hlo", *(f"plan x --target y {each}" for each in ("--html", "--trace", "--search --write"))]
)
def test_outputs_that_cannot_be_written_are_rejected_first(option, tmp_path, monkeypatch, exits):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    for name in (".", "missing/file", "file/file"):
        assert "must be a file in a writable directory" in exits(2, *option.split(), str(tmp_path / name)).err
    assert "is a symbolic link" in exits(2, *option.split(), str(tmp_path / "link")).err
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write everywhere
    assert "in a writable directory" in exits(2, *option.split(), str(tmp_path / "new")).err


def test_errors_of_arguments_escape_control_characters(exits):
    printed = exits(INVALID_INPUT, "train", "a", "--\x1b[2J").err
    assert "\\x1b[2J" in printed
    assert "\x1b" not in printed


@pytest.mark.parametrize("command", [["train"], ["launch", "--on", "local:2x4"]])
def test_invalid_config_is_one_message(command, cli):
    error = cli(INVALID_INPUT, *command, "quickstart", "train.stps=3", "model.layers=x").err
    assert error.splitlines() == [
        "error: 2 problems on the command line:",
        "  model.layers=x: model.layers must be an integer, got 'x' (string).",
        "  train.stps=3: train.stps is not a valid key. Did you mean train.steps?",
    ]


def test_launch_without_on_lists_launchers(cli):
    first, *lines = cli(INVALID_INPUT, "launch", "quickstart").err.splitlines()
    assert first == "error: spmdkit launch needs a launcher. Add one of these:"
    assert [re.split(r"[:\[ ]", line.removeprefix("  --on "))[0] for line in lines] == [*LAUNCHERS]
    assert lines[0].endswith("  P processes on this machine that simulate D CPU devices each, such as local:2x4")


def test_options_may_precede_overrides(monkeypatch):
    seen = []
    command = command_line.Command("launch", "", lambda arguments: seen.append(arguments) or 0, run_commands.add_launch)
    monkeypatch.setattr(command_line, "COMMANDS", (command,))
    assert command_line.main(["launch", "a", "x=1", "--on", "local:2x4", "y=2"]) == 0
    assert (seen[0].config, seen[0].overrides, seen[0].on) == ("a", ["x=1", "y=2"], "local:2x4")


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 75), (RuntimeError("x"), 1)])
def test_exit_codes_of_other_errors(error, code, monkeypatch, cli):
    def fail(arguments):
        raise error

    monkeypatch.setattr(command_line, "COMMANDS", (command_line.Command("train", "", fail, run_commands.add_train),))
    assert ("Traceback" in cli(code, "train", "a").err) == (code == 1)


@pytest.mark.parametrize("code", [0, None])
def test_an_exit_of_the_users_code_is_no_success(code, monkeypatch, cli):
    def users_code(arguments):
        sys.exit(code)

    command = command_line.Command("train", "", users_code, run_commands.add_train)
    monkeypatch.setattr(command_line, "COMMANDS", (command,))
    error = cli(2, "train", "a").err
    assert "`spmdkit train` is not done, but code that it calls exits the program with code 0 in" in error
    assert "(sys.exit(code))" in error


@pytest.mark.slow_cases("train-SIGTERM", "train-SIGUSR1")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
@pytest.mark.parametrize("command", ["train", "launch"])
def test_signal_during_parsing_exits_with_75(command, name):
    code = (
        "import os, signal, time\nfrom spmdkit.launch import cli\n"
        f"def slow(parser): os.kill(os.getpid(), signal.{name}); time.sleep(60)\n"
        "cli.COMMANDS = tuple(each._replace(add_arguments=slow) for each in cli.COMMANDS)\n"
        f"cli.main([{command!r}, 'quickstart'])\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert ended.returncode == 75, ended.stderr
    assert ended.stderr.startswith(f"ended by {name}; the same command resumes from the latest checkpoint")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize(
    "words", [["help"], ["--help"], ["--version"], ["train", "--list"], ["train", "--help"]], ids=" ".join
)
def test_reports_an_output_that_takes_nothing(words, unbuffered, capsys, monkeypatch):
    with io.TextIOWrapper(open("/dev/full", "wb", 0 if unbuffered else 2**16), write_through=unbuffered) as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert command_line.main(words) == 75
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: the standard output: No space left on device.")


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (False, 1)])
def test_verify_exits_with_1_if_training_differs(ok, code, cli, monkeypatch):
    found = SimpleNamespace(ok=ok, to_json=lambda: {"ok": ok})
    monkeypatch.setattr("spmdkit.runtime.verify.verify_config", lambda *_, **__: found)
    assert json.loads(cli(code, "verify", "quickstart", "--json").out) == {"ok": ok}
