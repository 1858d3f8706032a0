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
