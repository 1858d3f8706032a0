"""Meshes for the layout tests."""

import pytest
from spmdkit.mesh import DeviceMesh


@pytest.fixture
def mesh() -> DeviceMesh:
    """Eight devices as Keras users write them."""
    return DeviceMesh((2, 4), ("data", "model"))


@pytest.fixture
def canonical() -> DeviceMesh:
    """Eight devices with the six canonical axes."""
    return DeviceMesh.of(data=2, fsdp=4)
