"""The config of a run of pods; lets the tests of this folder import `pod_manifests`."""

import sys
from pathlib import Path

import pytest
from runs import write_config
from spmdkit.configs import load_config

sys.path[:0] = [str(Path(__file__).parent)]

from pod_manifests import MESH, POD  # noqa: E402  (after the path)


@pytest.fixture
def config(tmp_path):
    """The config of a run of four pods, with changes to the section `launch`."""

    def load(form="jobset", **launch):
        given = {**POD, **launch}
        given["kubernetes"] = {**POD["kubernetes"], "form": form, **launch.get("kubernetes", {})}
        path = write_config(tmp_path, **MESH, launch=given)
        return load_config(path, num_processes=None)

    return load
