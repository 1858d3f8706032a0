"""TensorLayout: axes, mesh, sharding, shard shapes."""

import pytest
from jax.sharding import NamedSharding, PartitionSpec
from spmdkit.layouts import TensorLayout
from spmdkit.layouts.tensor_layout import add_axis, split_further
from spmdkit.mesh import DeviceMesh
from support import toy


def test_the_mesh_may_come_later_once(mesh):
    layout = TensorLayout(["data", None])
    known = {layout}
    assert layout.device_mesh is None
    layout.device_mesh = mesh
    assert (layout.axes, layout.device_mesh) == (("data", None), mesh)
    assert layout in known, "the hash does not depend on the mesh"
    with pytest.raises(ValueError, match="Cannot override device mesh value"):
        layout.device_mesh = mesh


def test_rejects_an_unknown_axis_when_the_mesh_comes(mesh):
    layout = TensorLayout(("data", "modle"))
    message = r"Invalid axis names for Layout. Valid axis names: \('data', 'model'\), Got \('data', 'modle'\)"
    with pytest.raises(ValueError, match=message + ".*Did you mean 'model'"):
        layout.device_mesh = mesh
    assert layout.device_mesh is None


@pytest.mark.parametrize("property_name", ["spec", "backend_layout", "mesh"])
def test_needs_a_mesh(property_name):
    message = "Cannot create sharding when device mesh is not set for TensorLayout.*Pass it"
    with pytest.raises(ValueError, match=message):
        getattr(TensorLayout(("data", None)), property_name)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ("data", r"Write TensorLayout\(\('data',\)\)"),
        (None, "axes must have one entry for each dim"),
        *(
            ((entry, None), "Each entry is None .the dim is whole., the name of a")
            for entry in (1, ("data", 2), b"data")
        ),
    ],
)
def test_rejects_other_axes(axes, message):
    with pytest.raises(ValueError, match=message):
        TensorLayout(axes)


def test_backend_layout_is_a_named_sharding(mesh):
    layout = TensorLayout(("data", None), mesh)
    expected = NamedSharding(mesh.backend_mesh, PartitionSpec("data", None))
    assert isinstance(layout.backend_layout, NamedSharding)
    assert layout.backend_layout.is_equivalent_to(expected, 2)
    assert layout.backend_layout is layout.backend_layout


@pytest.mark.parametrize(
    ("axes", "spec"),
    [
        ((), PartitionSpec()),
        ((None, None), PartitionSpec()),  # trailing whole dims are left out
        ((None, "fsdp", None), PartitionSpec(None, "fsdp")),
        (("tensor", "fsdp"), PartitionSpec(None, "fsdp")),  # tensor has size 1
        ((("data", "fsdp"), None), PartitionSpec(("data", "fsdp"))),
        ((("data", "tensor"), None), PartitionSpec("data")),
        (((), ("fsdp",)), PartitionSpec(None, "fsdp")),
    ],
)
def test_spec(canonical, axes, spec):
    layout = TensorLayout(axes, canonical)
    assert layout.spec == spec


def test_an_axis_splits_one_dim_only(canonical):
    layout = TensorLayout(("fsdp", ("data", "fsdp")), canonical)
    assert layout.repeated_axes == ("fsdp",)
    with pytest.raises(ValueError, match="uses mesh axis 'fsdp' more than once; an axis can split one dim only"):
        _ = layout.spec


def test_axes_of_dims(canonical):
    layout = TensorLayout((("data", "fsdp"), "tensor", None), canonical)
    assert [layout.axes_of_dim(dim) for dim in range(4)] == [("data", "fsdp"), (), (), ()]
    assert layout.used_axes == ("data", "fsdp")
    assert layout.parts_of_dim(0) == 8
    assert TensorLayout(("tensor",)).used_axes == ("tensor",)  # sizes are unknown without a mesh


@pytest.mark.parametrize(
    ("axes", "shape", "shard"),
    [((("data", "fsdp"), None), (16, 3), (2, 3)), ((), (5, 7), (5, 7)), (("fsdp",), (0,), (0,))],
)
def test_shard_shape(canonical, axes, shape, shard):
    assert TensorLayout(axes, canonical).shard_shape(shape) == shard


@pytest.mark.parametrize(
    ("axes", "shape", "message"),
    [
        (
            (("data", "fsdp"), None),
            (12, 3),
            r"Layout \(\(data, fsdp\), None\) cannot split shape \(12, 3\): dim 0 of size 12 does not divide over .* "
            r"\(size 2 x 4 = 8\): 12 % 8 = 4; nearest dim sizes that work: 8 or 16; numbers of parts that work: 4",
        ),
        ((None, "fsdp"), (8,), r"Layout \(None, fsdp\) has 2 entries, but the array of shape \(8,\) has 1 dim"),
    ],
)
def test_shard_shape_explains_what_does_not_fit(canonical, axes, shape, message):
    with pytest.raises(ValueError, match=message):
        TensorLayout(axes, canonical).shard_shape(shape)


def test_equality_and_hash(mesh):
    same = DeviceMesh((2, 4), ("data", "model"))
    assert TensorLayout(("data", None), mesh) == TensorLayout(["data", None], same)
    assert TensorLayout((("data",), ()), mesh) == TensorLayout(("data", None), mesh)
    assert len({TensorLayout(("data",), mesh), TensorLayout(("data",), same)}) == 1
    assert TensorLayout(("data",), mesh) != TensorLayout(("model",), mesh)
    assert TensorLayout(("data",), mesh) != TensorLayout(("data",))
    assert TensorLayout(("data",)) != ("data",)


def test_text():
    entries = [(), ("fsdp",), (None, "fsdp"), (("data", "fsdp"), None)]
    assert [str(TensorLayout(axes)) for axes in entries] == ["()", "(fsdp,)", "(None, fsdp)", "((data, fsdp), None)"]
    assert repr(TensorLayout(("fsdp",))) == "TensorLayout((fsdp,))"


MESH = toy.mesh(data=2, fsdp=2, tensor=2)


@pytest.mark.parametrize(
    ("base", "shape", "first", "axes", "dim"),
    [
        ((None, None), (8, 16), 0, ("fsdp", None), 0),  # the first, not the largest
        ((None, None), (7, 16), 0, (None, "fsdp"), 1),
        ((None, None, None), (8, 8, 8), 1, (None, "fsdp", None), 1),
        (("tensor", None), (8, 16), 0, ("tensor", "fsdp"), 1),  # a whole dim before one that is split
        (("tensor", None), (8, 7), 0, (("tensor", "fsdp"), None), 0),
        (("tensor", None), (8, 7), 1, None, None),
        (("tensor", None), (6, 7), 0, None, None),  # 6 / 2 / 2 does not work out
        ((("tensor", "data"),), (8,), 0, (("tensor", "data", "fsdp"),), 0),
        ((None,), (9,), 0, None, None),
        ((), (), 0, None, None),
    ],
)
def test_which_dim(base, shape, first, axes, dim):
    found = split_further(TensorLayout(base, MESH), shape, MESH, "fsdp", first=first)
    if axes is None:
        assert found is None
    else:
        layout, split = found
        assert (layout.axes, split) == (axes, dim)


def test_an_axis_is_added_inside_the_parts_that_there_are():
    layout = TensorLayout((None, "tensor"), MESH)
    added = add_axis(layout, 1, "fsdp", MESH)
    assert added.axes == (None, ("tensor", "fsdp"))
    assert added.shard_shape((4, 16)) == (4, 4)
    assert add_axis(added, 0, "data", MESH).axes == ("data", ("tensor", "fsdp"))
