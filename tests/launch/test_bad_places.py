"""A place or an environment that cannot work is one message and exit code 2; nothing is started, and nothing left."""

import contextlib
import os
import re
from pathlib import Path

import pytest
from bad_places import TABLE
from runs import write_config
from spmdkit.launch.cli import main

CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")
JOBS = ("SPMDKIT_", "KERAS_DISTRIBUTION_", "JAX_COORDINATOR", "JAX_NUM_PROC", "JAX_PROCESS_ID", "SLURM_", "OMPI_")


def everything_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


TELLS_THE_OTHERS = "this process cannot start, and tells the others so (within 30 s)\n"


@pytest.mark.parametrize("name", TABLE)
def test_one_message_and_nothing_started(name, tmp_path, monkeypatch, capsys):
    bad, config = TABLE[name], write_config(tmp_path)
    for variable in [each for each in os.environ if each.startswith(JOBS)]:
        monkeypatch.delenv(variable)
    for variable, value in bad.variables.items():
        monkeypatch.setenv(variable, value)
    if bad.hosts is not None:
        content = bad.hosts if isinstance(bad.hosts, bytes) else bad.hosts.encode()
        (tmp_path / "hosts.yaml").write_bytes(content)
    before = everything_in(tmp_path)
    with contextlib.chdir(tmp_path):
        code = main(["train" if bad.variables else "launch", str(config), *bad.words])
    printed, said = capsys.readouterr()
    assert code == 2, said
    assert said.removeprefix(TELLS_THE_OTHERS).startswith("error: ")
    assert said.count("error: ") == 1
    assert "Traceback" not in said
    assert [part for part in bad.says if part not in said] == [], said
    assert not CONTROLS.search(said + printed)
    assert len(said) < 4000
    assert everything_in(tmp_path) == before
