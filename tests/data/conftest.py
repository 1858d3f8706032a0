"""A mesh of two axes over the eight devices, and a little text on disk."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


@pytest.fixture
def mesh():
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)


@pytest.fixture
def sharding(mesh):
    """Rows split eight ways."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


@pytest.fixture
def corpus(tmp_path):
    """A folder of 200 texts of 300 bytes, in subfolders."""
    random = np.random.default_rng(0)
    for number in range(200):
        path = tmp_path / "corpus" / f"part{number % 3}" / f"{number:03}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(random.integers(97, 123, size=300, dtype=np.uint8).tobytes())
    return tmp_path / "corpus"
