"""`spmdkit checkpoint` as it is typed: what it prints, and its exit codes."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from spmdkit.launch import cli

sys.path[:0] = [str(Path(__file__).parents[1] / "inspection"), str(Path(__file__).parents[2])]

from runs import write_config  # noqa: E402
from small_checkpoints import damage  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """The config of a run with checkpoints of steps 4, 8 and 12."""
    config = write_config(tmp_path_factory.mktemp("command"), checkpoint={"every": 4, "keep": 3})
    assert cli.main(["train", str(config)]) == 0
    return config


@pytest.fixture
def run(config, tmp_path):
    return shutil.copytree(config.parent / "run", tmp_path / "run")


def call(capsys, *words):
    capsys.readouterr()
    code = cli.main(["checkpoint", *map(str, words)])
    return code, capsys.readouterr()


def test_inspect(run, capsys):
    code, printed = call(capsys, "inspect", run)
    assert code == 0
    assert "3 checkpoints, newest step 12" in printed.out
    assert "saved on the mesh data 2 x fsdp 4" in printed.out
    assert "saved by spmdkit " in printed.out
    code, printed = call(capsys, "inspect", run, "--step", "8", "--json")
    assert code == 0
    assert json.loads(printed.out)["about"]["strategy"]["fsdp"]["size"] == 4
    assert json.loads(printed.out)["step"] == 8


def test_verify_says_by_its_code_what_is_damaged(run, capsys):
    code, printed = call(capsys, "verify", run)
    assert (code, printed.out.splitlines()[-1]) == (0, "3 checkpoints verified")
    damage(run / "checkpoints" / "8")
    code, printed = call(capsys, "verify", run)
    assert code == 2
    assert "checkpoints/8: DAMAGED" in printed.out
    assert "1 of 3 checkpoints damaged: 8. " in printed.out
    assert call(capsys, "verify", run, "--step", "4")[0] == 0
    code, printed = call(capsys, "verify", run, "--json")
    assert (code, [each["whole"] for each in json.loads(printed.out)]) == (2, [True, False, True])


def test_export(run, tmp_path, capsys):
    code, printed = call(capsys, "export", run, tmp_path / "x")
    assert (code, printed.out.startswith(f"Wrote {tmp_path / 'x'}: 4 arrays, ")) == (0, True)
    assert np.load(tmp_path / "x" / "layers/0/kernel.npy").shape == (64, 32)
    code, printed = call(capsys, "export", run, tmp_path / "x")
    assert (code, "is there already" in printed.err) == (2, True)


@pytest.mark.parametrize("part", ["inspect", "verify", "export"])
def test_where_there_is_nothing_one_line_says_so(part, tmp_path, capsys):
    more = {"export": [tmp_path / "x.safetensors"]}.get(part, [])
    code, printed = call(capsys, part, tmp_path / "none", *more)
    assert code == 2
    assert printed.err.startswith(f"error: There is no {tmp_path / 'none'}. ")
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["verfy", "x"], "'verfy' is no part of spmdkit checkpoint; did you mean verify?"),
        (["x"], "its parts are inspect, verify, export"),
        (["verify"], "the following arguments are required: RUN"),
        (["inspect", "x", "--step", "one"], "argument --step: invalid int value"),
    ],
)
def test_wrong_words(words, message, capsys):
    with pytest.raises(SystemExit) as raised:
        cli.main(["checkpoint", *words])
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["--help"], ["help"]])
def test_help_lists_the_parts(words, capsys):
    with pytest.raises(SystemExit) as raised:
        cli.main(["checkpoint", *words])
    assert raised.value.code == 0
    printed = capsys.readouterr().out
    for part in ("inspect", "verify", "export"):
        assert f"\n  spmdkit checkpoint {part} " in printed


@pytest.mark.parametrize("part", ["inspect", "verify", "export"])
def test_every_part_has_its_help(part, capsys):
    with pytest.raises(SystemExit) as raised:
        cli.main(["checkpoint", part, "--help"])
    assert raised.value.code == 0
    assert f"usage: spmdkit checkpoint {part} " in capsys.readouterr().out
