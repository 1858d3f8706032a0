"""Fixtures of these tests."""

from pathlib import Path

import pytest
from support.launch_cases import MESH, POD
from support.runs import write_config


@pytest.fixture
def config(tmp_path):
    """Writes the config of a run of four pods, with changes to the section `launch`."""

    def write(form="jobset", **launch) -> Path:
        given = {**POD, **launch}
        given["kubernetes"] = {**POD["kubernetes"], "form": form, **launch.get("kubernetes", {})}
        return write_config(tmp_path, **MESH, launch=given)

    return write


@pytest.fixture
def put_command(tmp_path, monkeypatch):
    """Puts a command first on PATH that prints two texts, ends with a code, and keeps what it is given."""
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")

    def put(name: str, out: str = "", err: str = "", code: int = 0, reads: bool = False) -> None:
        (tools / "out").write_text(out)
        (tools / "err").write_text(err)
        keep = f'env >{tools}/env; echo "$@" >{tools}/words; {f"cat >{tools}/given" if reads else ":"}'
        (tools / name).write_text(f"#!/bin/sh\n{keep}\ncat {tools}/out; cat {tools}/err >&2; exit {code}\n")
        (tools / name).chmod(0o755)

    return put
