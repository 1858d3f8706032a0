"""Blocks as one array, read where they are asked for and nowhere else."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from spmdkit.mesh.device_mesh import DeviceMesh
from spmdkit.mesh.errors import UserError
from spmdkit.models.hugging_face.stacked import Stacked

WHOLE = np.random.default_rng(0).normal(size=(4, 6, 8)).astype(np.float32)


class Recorded:
    """An array that remembers what was read of it."""

    def __init__(self, array):
        self.array, self.shape, self.dtype, self.read = array, array.shape, array.dtype, []

    def __getitem__(self, index):
        self.read.append(index)
        return self.array[index]


@pytest.mark.parametrize(
    "index",
    [
        np.s_[:],
        np.s_[1:3, 2:4],
        np.s_[:, :, 3:],
        np.s_[2],
        np.s_[-1, 0],
        np.s_[::2, :, 0],
        (np.array([3, 0, 0]), slice(1, 2), slice(None)),
        np.s_[2:2, :3],
    ],
)
def test_indices_are_numpys(index):
    found = Stacked(list(WHOLE))[index]
    np.testing.assert_array_equal(found, WHOLE[index])
    assert found.dtype == np.float32


def test_as_an_array():
    stacked = Stacked(list(WHOLE))
    assert (stacked.shape, stacked.ndim, len(stacked)) == ((4, 6, 8), 3, 4)
    np.testing.assert_array_equal(np.asarray(stacked), WHOLE)
    assert np.asarray(stacked, np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="without a copy"):
        np.asarray(stacked, copy=False)


def test_every_device_reads_its_own_part():
    parts = [Recorded(array) for array in WHOLE]
    mesh = DeviceMesh.of(fsdp=2, pipe=2, devices=[f"cpu:{n}" for n in range(4)]).backend_mesh
    sharding = jax.sharding.NamedSharding(mesh, PartitionSpec("pipe", None, "fsdp"))
    stacked = Stacked(parts)
    array = jax.make_array_from_callback(stacked.shape, sharding, lambda index: stacked[index])
    np.testing.assert_array_equal(array, WHOLE)
    for part in parts:
        read = sum(WHOLE[0][index].size for index in part.read)
        assert read == part.array.size  # each half once, by the two devices of its stage
        assert len(part.read) == 2


def test_blocks_that_differ():
    with pytest.raises(UserError, match=r"Block 1 is float32\[6, 7\] and block 0 float32\[6, 8\]"):
        Stacked([WHOLE[0], WHOLE[0][:, :7]])
