"""A machine without the compilers of other platforms."""

import pytest
from spmdkit.mesh import targets


@pytest.fixture
def without_compiler(monkeypatch):
    monkeypatch.setattr(targets, "CUDA_PLUGINS", ())
    monkeypatch.setattr(targets, "TPU_PLUGINS", ())
