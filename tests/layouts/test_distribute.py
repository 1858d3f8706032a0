"""distribute_tensor inside and outside of jit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec
from spmdkit.layouts import TensorLayout, distribute_tensor
from spmdkit.mesh import DeviceMesh


@pytest.fixture
def sharding(mesh) -> NamedSharding:
    return NamedSharding(mesh.backend_mesh, PartitionSpec("data", "model"))


@pytest.mark.parametrize("kind", ["layout", "sharding"])
@pytest.mark.parametrize("tensor", [np.ones((8, 8), np.float32), jnp.ones((8, 8))], ids=["numpy", "jax"])
def test_outside_jit(mesh, sharding, kind, tensor):
    layout = TensorLayout(("data", "model"), mesh) if kind == "layout" else sharding
    placed = distribute_tensor(tensor, layout)
    assert placed.sharding.is_equivalent_to(sharding, 2)
    assert {shard.data.shape for shard in placed.addressable_shards} == {(4, 2)}
    np.testing.assert_array_equal(placed, tensor)


def test_an_array_that_lies_so_is_not_copied(mesh, sharding):
    placed = distribute_tensor(jnp.ones((8, 8)), sharding)
    assert distribute_tensor(placed, TensorLayout(("data", "model"), mesh)) is placed
    assert distribute_tensor(placed, sharding) is placed
    assert distribute_tensor(placed, TensorLayout(("model", None), mesh)) is not placed


@pytest.mark.parametrize("kind", ["layout", "sharding"])
def test_inside_jit(mesh, sharding, kind):
    layout = TensorLayout(("data", "model"), mesh) if kind == "layout" else sharding
    doubled = jax.jit(lambda x: distribute_tensor(x * 2, layout))(jnp.ones((8, 8)))
    assert doubled.sharding.is_equivalent_to(sharding, 2)


def test_a_format_has_an_order_in_memory(sharding):
    columns = Format(Layout((1, 0)), sharding)
    placed = distribute_tensor(jnp.ones((8, 8)), columns)
    assert placed.format.layout.major_to_minor == (1, 0)
    assert placed.sharding.is_equivalent_to(sharding, 2)
    inside = jax.jit(lambda x: distribute_tensor(x * 2, columns))(jnp.ones((8, 8)))
    assert inside.sharding.is_equivalent_to(sharding, 2)


def test_an_abstract_array_is_unchanged(mesh):
    abstract = jax.ShapeDtypeStruct((8, 8), "float32")
    assert distribute_tensor(abstract, TensorLayout(("data", None), mesh)) is abstract


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (("data", None, None), "has 3 entries, but the array of shape .8, 6. has 2 dims"),
        ((None, "model"), "dim 1 of size 6 does not divide over model .size 4.: 6 % 4 = 2"),
    ],
)
@pytest.mark.parametrize("place", [lambda f: f, jax.jit], ids=["outside", "inside"])
def test_layouts_that_do_not_fit(mesh, axes, message, place):
    with pytest.raises(ValueError, match=message):
        place(lambda x: distribute_tensor(x, TensorLayout(axes, mesh)))(jnp.ones((8, 6)))


def test_needs_a_mesh():
    with pytest.raises(ValueError, match="Cannot create sharding when device mesh is not set"):
        distribute_tensor(jnp.ones(8), TensorLayout(("data",)))


def test_a_subset_of_the_devices():
    mesh = DeviceMesh.simulated(2)
    placed = distribute_tensor(jnp.ones(8), TensorLayout(("data",), mesh))
    assert {device.id for device in placed.sharding.device_set} == {0, 1}
