"""Rows follow from the sharding: pretend processes, any mesh, no rank."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from spmdkit.data import eval_batches, from_arrays, train_batches
from spmdkit.data.placement import check_divisible, mover, place, rows_of_devices, storage_sharding
from spmdkit.mesh.device_mesh import DeviceMesh
from spmdkit.mesh.errors import UserError
from spmdkit.parallel.xla.census import census


def shard(devices, shape, axis_names, *spec):
    mesh = Mesh(np.array(devices).reshape(shape), axis_names, axis_types=(AxisType.Auto,) * len(shape))
    return NamedSharding(mesh, PartitionSpec(*spec))


@pytest.mark.parametrize(
    ("shape", "axis_names", "spec", "expected"),
    [
        ((8,), ("data",), ("data",), [range(0, 8), range(8, 16)]),
        ((2, 4), ("data", "fsdp"), (("data", "fsdp"),), [range(0, 8), range(8, 16)]),
        ((2, 4), ("data", "tensor"), ("data",), [range(0, 8), range(8, 16)]),
        ((2, 4), ("tensor", "data"), ("data",), [range(16), range(16)]),  # both hold all rows: tensor parts of them
        ((4, 2), ("data", "fsdp"), (("fsdp", "data"),), [[0, 1, 8, 9, 2, 3, 10, 11], [4, 5, 12, 13, 6, 7, 14, 15]]),
        ((8,), ("data",), (), [range(16), range(16)]),  # replicated rows
    ],
)
def test_two_pretend_processes(shape, axis_names, spec, expected):
    sharding = shard(jax.devices(), shape, axis_names, *spec)
    halves = [rows_of_devices(sharding, 16, devices) for devices in (jax.devices()[:4], jax.devices()[4:])]
    assert [half.tolist() for half in halves] == [sorted(rows) for rows in expected]


@pytest.mark.parametrize("spec", [(("data", "fsdp"),), ("data",), (("fsdp", "data"),), ()])
def test_place_rows_puts_each_row_where_the_sharding_says(mesh, spec):
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    batch = {"a": np.arange(48, dtype=np.int32).reshape(16, 3), "b": np.arange(16, dtype=np.float32)}
    placed = place(batch, np.arange(16), 16, sharding)
    for name, array in batch.items():
        assert np.array_equal(placed[name], array)
        assert placed[name].sharding == sharding
        for part in placed[name].addressable_shards:
            assert np.array_equal(part.data, array[part.index])


@pytest.mark.parametrize("spec", [(("data", "fsdp"),), ("data",), (("fsdp", "data"),)])
def test_a_process_finds_its_rows_among_those_it_read(monkeypatch, spec):
    """Two pretend processes whose devices lie anywhere on the mesh: what one has read begins at no row 0."""
    shuffled = np.random.default_rng(1).permutation(np.array(jax.devices()))
    sharding, batch = shard(shuffled, (2, 4), ("data", "fsdp"), *spec), np.arange(16) * 10
    monkeypatch.setattr(jax, "make_array_from_callback", lambda shape, sharding, part: part)
    for devices in (jax.devices()[:4], jax.devices()[4:]):
        rows = rows_of_devices(sharding, 16, devices)
        part = place({"a": batch[rows]}, rows, 16, sharding)["a"]
        for device in devices:
            index = sharding.devices_indices_map((16,))[device]
            np.testing.assert_array_equal(part(index), batch[index])


@pytest.mark.parametrize("bits", [32, 64])
def test_places_arrays_in_dtypes_of_jax(sharding, bits, request):
    if bits == 64:
        request.getfixturevalue("float64")
    placed = place({"a": np.zeros(8, np.int64), "b": np.zeros(8, np.float64)}, np.arange(8), 8, sharding)
    assert (str(placed["a"].dtype), str(placed["b"].dtype)) == (f"int{bits}", f"float{bits}")


@pytest.mark.parametrize(("rows", "remedy"), [(12, "8 or 16"), (3, "8"), (0, "8")])
def test_indivisible_batches(sharding, rows, remedy):
    message = (
        rf"train\.global_batch={rows} rows cannot be split over the mesh axes data 2 x fsdp 4 = 8 parts: {rows} % 8"
    )
    with pytest.raises(ValueError, match=message + rf" = {rows % 8}\. Set train\.global_batch to {remedy}\."):
        rows_of_devices(sharding, rows, jax.devices())


def test_divisibility_needs_no_devices():
    mesh = AbstractMesh((64, 16), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    check_divisible(NamedSharding(mesh, PartitionSpec("data")), 128)
    with pytest.raises(ValueError, match="data 64 = 64 parts"):
        check_divisible(NamedSharding(mesh, PartitionSpec("data", None)), 100)


ROWS, LENGTH = 16, 12
ALL_AXES = ["data", "context", "tensor"]


@pytest.fixture
def device_mesh():
    return DeviceMesh.of(data=2, context=2, tensor=2)


@pytest.fixture
def step(device_mesh):
    return NamedSharding(device_mesh.backend_mesh, PartitionSpec("data"))


@pytest.fixture
def source():
    inputs = np.arange(50 * LENGTH, dtype=np.int32).reshape(50, LENGTH)
    return from_arrays({"inputs": inputs, "targets": inputs + 1}).train


def batches(source, step, layout):
    options = {"global_batch": ROWS, "layout": layout}
    yield from train_batches(source, step, seed=3, start_step=2, num_steps=3, **options)
    yield from eval_batches(source, step, **options)


@pytest.mark.parametrize("layout", [ALL_AXES, ["context", "data"], ["tensor"]])
def test_layout_keeps_batches(layout, source, step):
    for one, other in zip(batches(source, step, layout), batches(source, step, ()), strict=True):
        assert one.keys() == other.keys()
        for name, array in other.items():
            np.testing.assert_array_equal(one[name], array)
            assert one[name].sharding == array.sharding


def test_one_program_gathers_to_step_layout(device_mesh, step):
    stored = storage_sharding(ALL_AXES, step, ROWS)
    shapes = {"inputs": (ROWS, LENGTH), "targets": (ROWS, LENGTH), "weights": (ROWS, LENGTH), "example": (ROWS,)}
    batch = {name: jax.ShapeDtypeStruct(shape, np.float32, sharding=stored) for name, shape in shapes.items()}
    found = census(mover(step).lower(batch).compile().as_text() or "", device_mesh)
    gathered = 3 * ROWS * LENGTH * 4 // 2 + ROWS * 4 // 2
    assert {(each.kind, each.axes): each.bytes for each in found} == {("all-gather", ("context", "tensor")): gathered}


def test_layout_reads_each_row_once_and_sends_each_value_once(step):
    """The processes here are halves of a context group: without a layout both read all rows of it."""
    stored = storage_sharding(ALL_AXES, step, ROWS)
    halves = np.moveaxis(np.array(step.mesh.devices), step.mesh.axis_names.index("context"), 0).reshape(2, -1)
    read = [rows_of_devices(stored, ROWS, half).tolist() for half in halves]
    assert sorted(read[0] + read[1]) == [*range(ROWS)]
    placed = place({"inputs": np.zeros((ROWS, LENGTH))}, np.arange(ROWS), ROWS, stored)["inputs"]
    assert sum(shard.data.size for shard in placed.addressable_shards) == ROWS * LENGTH


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (["data", "contxt"], r"data\.layout: Unknown mesh axis 'contxt'; known: .*Did you mean 'context'"),
        (["data", "data"], r"data\.layout=\['data', 'data'\] lists data twice"),
        (["data", "context", "tensor"], r"= 8 parts: 12 % 8 = 4\..* 8 or 16 or remove an axis from data.layout"),
    ],
)
def test_rejects_invalid_layouts(layout, message, source, step):
    with pytest.raises(UserError, match=message):
        train_batches(source, step, global_batch=12, seed=0, start_step=0, num_steps=1, layout=layout)
