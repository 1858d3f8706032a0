"""TensorLayout: axes, mesh, sharding, shard shapes."""

import pytest
from jax.sharding import NamedSharding, PartitionSpec
from spmdkit.layouts import TensorLayout
from spmdkit.mesh import DeviceMesh


def test_keeps_axes_and_mesh(mesh):
    layout = TensorLayout(["data", None, None], mesh)
    assert layout.axes == ("data", None, None)
    assert layout.device_mesh is mesh


def test_rejects_an_unknown_axis(mesh):
    message = r"Invalid axis names for Layout. Valid axis names: \('data', 'model'\), Got \('data', 'modle'\)"
    with pytest.raises(ValueError, match=message + ".*Did you mean 'model'"):
        TensorLayout(("data", "modle"), mesh)


def test_the_mesh_may_come_later_once(mesh):
    layout = TensorLayout(("data", None))
    assert layout.device_mesh is None
    layout.device_mesh = mesh
    assert layout.device_mesh is mesh
    with pytest.raises(ValueError, match="Cannot override device mesh value"):
        layout.device_mesh = mesh


def test_axes_are_checked_when_the_mesh_comes(mesh):
    layout = TensorLayout(("data", "unknown_axis"))
    with pytest.raises(ValueError, match="Invalid axis names for Layout"):
        layout.device_mesh = mesh
    assert layout.device_mesh is None


@pytest.mark.parametrize("property_name", ["spec", "backend_layout", "mesh"])
def test_needs_a_mesh(property_name):
    message = "Cannot create sharding when device mesh is not set for TensorLayout.*Give it"
    with pytest.raises(ValueError, match=message):
        getattr(TensorLayout(("data", None)), property_name)


@pytest.mark.parametrize("entry", [1, ("data", 2), b"data"])
def test_rejects_other_entries(entry):
    with pytest.raises(ValueError, match=r"Each entry is None .the dim is whole., the name of a mesh axis"):
        TensorLayout((entry, None))


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


def test_shard_shape(canonical):
    assert TensorLayout((("data", "fsdp"), None), canonical).shard_shape((16, 3)) == (2, 3)
    assert TensorLayout((), canonical).shard_shape((5, 7)) == (5, 7)


def test_shard_shape_explains_what_does_not_divide(canonical):
    with pytest.raises(ValueError) as error:
        TensorLayout((("data", "fsdp"), None), canonical).shard_shape((12, 3))
    message = str(error.value)
    assert "Layout ((data, fsdp), None) cannot split shape (12, 3): dim 0 of size 12" in message
    assert "(size 2 x 4 = 8): 12 % 8 = 4; nearest dim sizes that work: 8 or 16" in message
    assert "numbers of parts that work: 4" in message


def test_shard_shape_needs_enough_dims(canonical):
    with pytest.raises(
        ValueError, match=r"Layout \(None, fsdp\) has 2 entries, but the array of shape \(8,\) has 1 dim"
    ):
        TensorLayout((None, "fsdp"), canonical).shard_shape((8,))


def test_a_dim_of_size_zero_divides(canonical):
    assert TensorLayout(("fsdp",), canonical).shard_shape((0,)) == (0,)


def test_equality_and_hash(mesh):
    same = DeviceMesh((2, 4), ("data", "model"))
    assert TensorLayout(("data", None), mesh) == TensorLayout(["data", None], same)
    assert TensorLayout((("data",), ()), mesh) == TensorLayout(("data", None), mesh)
    assert len({TensorLayout(("data",), mesh), TensorLayout(("data",), same)}) == 1
    assert TensorLayout(("data",), mesh) != TensorLayout(("model",), mesh)
    assert TensorLayout(("data",), mesh) != TensorLayout(("data",))
    assert TensorLayout(("data",)) != ("data",)


def test_the_hash_survives_the_mesh(mesh):
    layout = TensorLayout(("data",))
    known = {layout}
    layout.device_mesh = mesh
    assert layout in known


@pytest.mark.parametrize(
    ("axes", "text"),
    [
        ((), "()"),
        (("fsdp",), "(fsdp,)"),
        ((None, "fsdp"), "(None, fsdp)"),
        ((("data", "fsdp"), None), "((data, fsdp), None)"),
    ],
)
def test_text(axes, text):
    assert str(TensorLayout(axes)) == text
    assert repr(TensorLayout(axes)) == f"TensorLayout({text})"
