"""distribute_tensor inside and outside of jit."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec
from spmdkit.layouts import TensorLayout, distribute_tensor
from spmdkit.mesh import UserError


@pytest.fixture
def sharding(mesh) -> NamedSharding:
    return NamedSharding(mesh.backend_mesh, PartitionSpec("data", "model"))


@pytest.mark.parametrize("kind", ["layout", "sharding"])
def test_lays_out_arrays_inside_and_outside_jit(mesh, sharding, kind):
    layout = TensorLayout(("data", "model"), mesh) if kind == "layout" else sharding
    for tensor in (np.ones((8, 8), np.float32), jnp.ones((8, 8))):
        placed = distribute_tensor(tensor, layout)
        assert placed.sharding.is_equivalent_to(sharding, 2)
        assert {shard.data.shape for shard in placed.addressable_shards} == {(4, 2)}
        np.testing.assert_array_equal(placed, tensor)
    doubled = jax.jit(lambda x: distribute_tensor(x * 2, layout))(jnp.ones((8, 8)))
    assert doubled.sharding.is_equivalent_to(sharding, 2)


def test_does_not_copy_an_array_in_its_layout(mesh, sharding):
    placed = distribute_tensor(jnp.ones((8, 8)), sharding)
    assert distribute_tensor(placed, TensorLayout(("data", "model"), mesh)) is placed
    assert distribute_tensor(placed, sharding) is placed
    assert distribute_tensor(placed, TensorLayout(("model", None), mesh)) is not placed
    abstract = jax.ShapeDtypeStruct((8, 8), "float32")
    assert distribute_tensor(abstract, TensorLayout(("data", None), mesh)) is abstract


def test_a_format_has_an_order_in_memory(sharding):
    columns = Format(Layout((1, 0)), sharding)
    placed = distribute_tensor(jnp.ones((8, 8)), columns)
    assert placed.format.layout.major_to_minor == (1, 0)
    assert placed.sharding.is_equivalent_to(sharding, 2)
    inside = jax.jit(lambda x: distribute_tensor(x * 2, columns))(jnp.ones((8, 8)))
    assert inside.sharding.is_equivalent_to(sharding, 2)


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


@pytest.mark.parametrize(
    ("given", "axes"),
    [([[1, 2], [3, 4]], ("data", None)), ((1.0, 2.0), ("data",)), (1.5, ()), (True, ()), (np.float32(2), ())],
    ids=repr,
)
def test_lists_and_numbers_are_arrays(mesh, given, axes):
    layout = TensorLayout(axes, mesh)
    placed = distribute_tensor(given, layout)
    np.testing.assert_array_equal(placed, np.asarray(given))
    assert placed.sharding.is_equivalent_to(layout.backend_layout, placed.ndim)


def test_a_list_of_traced_arrays(mesh):
    layout = TensorLayout(("data", None), mesh)
    stacked = jax.jit(lambda x: distribute_tensor([x, 2 * x], layout))(jnp.ones(4))
    assert stacked.sharding.is_equivalent_to(layout.backend_layout, 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"a": np.ones(2)}, r"takes one array, got a dict.*jax.tree.map\(distribute_tensor, tree, layouts\)"),
        ("data", "takes one array, got a str"),
        ([[1, 2], [3]], "takes one array, got a list: setting an array element"),
    ],
)
def test_rejects_other_values(mesh, given, message):
    with pytest.raises(UserError, match=message):
        distribute_tensor(given, TensorLayout(("data",), mesh))


@pytest.mark.parametrize("layout", [None, ("data",), PartitionSpec("data"), "data"], ids=repr)
def test_rejects_other_layouts(layout):
    with pytest.raises(UserError, match=r"takes a TensorLayout with a mesh, a JAX Sharding or a Format"):
        distribute_tensor(np.ones(2), layout)


@pytest.mark.parametrize("axes", [("data", None), (None, "model"), (None, None)], ids=str)
def test_symbolic_sizes(mesh, axes):
    """`jax.export` with sizes that are known only when the program is called."""
    function = jax.jit(lambda x: distribute_tensor(x * 2, TensorLayout(axes, mesh)))
    exported = jax.export.export(function)(jax.ShapeDtypeStruct(jax.export.symbolic_shape("rows, 4"), jnp.float32))
    assert exported.nr_devices == 8
    with pytest.raises(ValueError, match="dim 1 of size 3 does not divide"):  # what is known is checked
        jax.export.export(jax.jit(lambda x: distribute_tensor(x, TensorLayout((None, "model"), mesh))))(
            jax.ShapeDtypeStruct(jax.export.symbolic_shape("rows, 3"), jnp.float32)
        )
