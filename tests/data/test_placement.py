"""Rows follow from the sharding: pretend processes, any mesh, no rank."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from spmdkit.data import bucket_by_length, eval_batches, from_arrays, from_dataset, train_batches
from spmdkit.data.batches import check_layout
from spmdkit.data.placement import Storage, check_divisible, rows_of_devices
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
    placed = Storage({}, sharding).place(batch, np.arange(16), 16)
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
        part = Storage({}, sharding).place({"a": batch[rows]}, rows, 16)["a"]
        for device in devices:
            index = sharding.devices_indices_map((16,))[device]
            np.testing.assert_array_equal(part(index), batch[index])


@pytest.mark.parametrize("bits", [32, 64])
def test_places_arrays_in_dtypes_of_jax(sharding, bits, request):
    if bits == 64:
        request.getfixturevalue("float64")
    placed = Storage({}, sharding).place({"a": np.zeros(8, np.int64), "b": np.zeros(8, np.float64)}, np.arange(8), 8)
    assert (str(placed["a"].dtype), str(placed["b"].dtype)) == (f"int{bits}", f"float{bits}")


@pytest.mark.parametrize(("rows", "nearest"), [(12, 16), (3, 8), (0, 8)])
def test_indivisible_batches(sharding, rows, nearest):
    message = rf"{rows} rows cannot be split over the mesh axes data 2 x fsdp 4 = 8 parts: {rows} % 8 = {rows % 8}\. "
    remedy = rf"Set train\.global_batch to a multiple of 8; the nearest is {nearest}\."
    with pytest.raises(ValueError, match=rf"train\.global_batch={message}{remedy}"):
        rows_of_devices(sharding, rows, jax.devices())


def test_divisibility_needs_no_devices():
    mesh = AbstractMesh((64, 16), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    check_divisible(NamedSharding(mesh, PartitionSpec("data")), 128)
    with pytest.raises(ValueError, match="data 64 = 64 parts"):
        check_divisible(NamedSharding(mesh, PartitionSpec("data", None)), 100)


ROWS, LENGTH = 16, 12
OVER_ALL = {".*": [["data", "context", "tensor"]]}
POSITIONS = {"inputs|targets|weights": [["data"], "context"], "example": [["data", "context"]]}
SIZES = {"data": 2, "context": 2, "tensor": 2}


@pytest.fixture
def device_mesh():
    return DeviceMesh.of(**SIZES)


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


@pytest.mark.parametrize("layout", [OVER_ALL, POSITIONS, {"inputs": [None, "tensor"]}, {"inputs": ["context", "data"]}])
def test_layout_keeps_batches(layout, source, step):
    for one, other in zip(batches(source, step, layout), batches(source, step, None), strict=True):
        assert one.keys() == other.keys()
        for name, array in other.items():
            np.testing.assert_array_equal(one[name], array)
            assert one[name].sharding == array.sharding


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (OVER_ALL, {("all-gather", ("context", "tensor")): 3 * ROWS * LENGTH * 4 // 2 + ROWS * 4 // 2}),
        (POSITIONS, {("all-gather", ("context",)): 3 * ROWS * LENGTH * 4 // 2 + ROWS * 4 // 2}),
    ],
    ids=["all", "positions"],
)
def test_one_program_gathers_to_step_layout(layout, expected, device_mesh, step):
    storage = Storage(layout, step)
    shapes = {"inputs": (ROWS, LENGTH), "targets": (ROWS, LENGTH), "weights": (ROWS, LENGTH), "example": (ROWS,)}
    stored = {
        name: jax.ShapeDtypeStruct(shape, np.float32, sharding=storage.sharding(name, shape))
        for name, shape in shapes.items()
    }
    found = census(storage.move.lower(stored).compile().as_text() or "", device_mesh)
    assert {(each.kind, each.axes): each.bytes for each in found} == expected


def test_layout_reads_each_row_once_and_sends_each_value_once(step, source):
    """The processes here are halves of a context group: without a layout both read all rows of it."""
    shapes = {"inputs": (ROWS, LENGTH), "example": (ROWS,)}
    devices = np.moveaxis(np.array(step.mesh.devices), step.mesh.axis_names.index("context"), 0).reshape(2, -1)
    read = {}
    for name, layout in (("all", OVER_ALL), ("positions", POSITIONS)):
        storage = Storage(layout, step)
        read[name] = [storage.rows_of_devices(shapes, [*half]).tolist() for half in devices]
    assert sorted(read["all"][0] + read["all"][1]) == [*range(ROWS)]
    assert read["positions"] == [[*range(ROWS)]] * 2
    local = {"inputs": np.zeros(shapes["inputs"]), "example": np.zeros(ROWS)}
    placed = Storage(OVER_ALL, step).place(local, np.arange(ROWS), ROWS)
    for name, array in local.items():
        assert sum(shard.data.size for shard in placed[name].addressable_shards) == array.size


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"inputs": ["data", "contxt"]}, "unknown axis 'contxt'; the mesh has .*Did you mean context"),
        ({"inputs": ["data", "data"]}, "names the axis data twice; an axis can split only one dim"),
        ({"inputs": [None, ["data", "context", "tensor"]]}, "splits dim 1 of inputs (16, 12) over .* = 8 parts: 12 %"),
        (
            {"input": ["data"]},
            "'input' does not match any array of a batch (example, inputs, targets, weights). Did you mean inputs",
        ),
        ({".*": ["data", None, None]}, r"['.*'] has 3 entries, but \w+ has 2 dims. Give at most one entry per dim"),
        ({"(": ["data"]}, "'(' is not a valid regular expression"),
    ],
)
def test_rejects_invalid_layouts(layout, message, source, step):
    with pytest.raises(UserError) as caught:
        train_batches(source, step, global_batch=ROWS, seed=0, start_step=0, num_steps=1, layout=layout)
    assert re.search(re.sub(r"[][()]", lambda found: rf"\{found[0]}", message), str(caught.value))
    assert "data.layout" in str(caught.value)


def test_checks_layout_for_every_bucket_length():
    """Of the lengths 8 and 6, the longest would divide."""
    rows = [(np.arange(length), np.arange(length)) for length in (8, 6) for _ in range(8)]
    splits = bucket_by_length(from_dataset(rows), lengths=(6, 8))
    devices = DeviceMesh.of(data=2, context=4).backend_mesh
    with pytest.raises(UserError, match=r"splits dim 1 of inputs \(8, 6\) over context = 4 parts: 6 % 4 = 2"):
        check_layout(splits.train, 8, NamedSharding(devices, PartitionSpec("data")), {"inputs": [None, "context"]})
