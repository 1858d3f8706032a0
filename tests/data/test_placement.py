"""Rows follow from the sharding: pretend processes, any mesh, no rank."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from spmdkit.data.placement import check_divisible, place_rows, rows_of_devices


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


@pytest.mark.parametrize("num_processes", [1, 2, 4, 8])
def test_processes_share_all_rows_whatever_their_order_on_the_mesh(num_processes):
    shuffled = np.random.default_rng(0).permutation(np.array(jax.devices()))
    sharding = shard(shuffled, (2, 4), ("data", "fsdp"), ("data", "fsdp"))
    processes = np.array_split(np.array(jax.devices()), num_processes)
    rows = [rows_of_devices(sharding, 32, devices) for devices in processes]
    assert sorted(np.concatenate(rows).tolist()) == list(range(32))


@pytest.mark.parametrize("spec", [(("data", "fsdp"),), ("data",), (("fsdp", "data"),), ()])
def test_place_rows_puts_each_row_where_the_sharding_says(mesh, spec):
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    batch = {"a": np.arange(48, dtype=np.int32).reshape(16, 3), "b": np.arange(16, dtype=np.float32)}
    placed = place_rows(batch, np.arange(16), sharding, 16)
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
        part = place_rows({"a": batch[rows]}, rows, sharding, 16)["a"]
        for device in devices:
            index = sharding.devices_indices_map((16,))[device]
            np.testing.assert_array_equal(part(index), batch[index])


def test_dtypes_are_those_of_jax(sharding):
    placed = place_rows({"a": np.zeros(8, np.int64), "b": np.zeros(8, np.float64)}, np.arange(8), sharding, 8)
    assert (placed["a"].dtype, placed["b"].dtype) == (np.int32, np.float32)


@pytest.mark.usefixtures("float64")
def test_dtypes_are_those_of_jax_in_64_bits(sharding):
    placed = place_rows({"a": np.zeros(8, np.int64), "b": np.zeros(8, np.float64)}, np.arange(8), sharding, 8)
    assert (placed["a"].dtype, placed["b"].dtype) == (np.int64, np.float64)


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
