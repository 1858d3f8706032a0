"""DataParallel, ModelParallel and the process's distribution."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from spmdkit.layouts import (
    DataParallel,
    Distribution,
    LayoutError,
    LayoutMap,
    ModelParallel,
    TensorLayout,
    distribution,
    set_distribution,
)
from spmdkit.mesh import DeviceMesh

KERNEL = SimpleNamespace(path="dense/kernel", shape=(8, 4))
BIAS = SimpleNamespace(path="dense/bias", shape=(4,))
SEED = SimpleNamespace(path="seed_generator/state", shape=(2,))


@pytest.fixture
def line() -> DeviceMesh:
    return DeviceMesh((8,), ("data",))


@pytest.fixture
def rules(mesh) -> LayoutMap:
    rules = LayoutMap(mesh)
    rules[".*kernel"] = (None, "model")
    rules[".*bias"] = ("model",)
    rules["/model/layer/tensor"] = ("data", None)
    return rules


@pytest.fixture
def processes(monkeypatch):
    """Pretends that this is one of several processes."""

    def pretend(count: int, number: int = 0) -> None:
        monkeypatch.setattr(jax, "process_count", lambda: count)
        monkeypatch.setattr(jax, "process_index", lambda: number)

    return pretend


class Replicas(Distribution):
    """A distribution with a given number of model replicas."""

    num_model_replicas = 1  # pyright: ignore


# The process's distribution


def test_scopes_nest_and_restore(line, rules):
    outer, inner = DataParallel(line), ModelParallel(layout_map=rules)
    assert distribution() is None
    with outer.scope():
        assert distribution() is outer
        with inner.scope():
            assert distribution() is inner
        assert distribution() is outer
        with pytest.raises(KeyError), inner.scope():
            raise KeyError
        assert distribution() is outer
    assert distribution() is None


def test_sets_and_clears(line):
    value = DataParallel(line)
    set_distribution(value)
    assert distribution() is value
    set_distribution(None)
    assert distribution() is None
    with pytest.raises(ValueError, match=r"takes a DataParallel, a ModelParallel or None, not 'fsdp' \(str\)"):
        set_distribution("fsdp")


# What all share


def test_keeps_the_mesh(mesh):
    base = Distribution(mesh, "data", auto_shard_dataset=False)
    assert base.device_mesh is mesh
    assert (base.batch_dim_name, base.auto_shard_dataset) == ("data", False)
    base.auto_shard_dataset = True
    assert base.auto_shard_dataset


@pytest.mark.parametrize("method", ["get_variable_layout", "get_tensor_layout", "layout_table"])
def test_the_base_decides_no_layout(mesh, method):
    with pytest.raises(NotImplementedError, match=f"Distribution must define {method}"):
        getattr(Distribution(mesh), method)(KERNEL)
    with pytest.raises(NotImplementedError, match="num_model_replicas"):
        _ = Distribution(mesh).num_model_replicas


@pytest.mark.parametrize(("replicas", "parts"), [(8, [0, 1, 2, 3]), (4, [0, 1, 2, 3]), (2, [0, 0, 1, 1]), (1, [0] * 4)])
def test_processes_of_one_replica_read_the_same(mesh, processes, monkeypatch, replicas, parts):
    monkeypatch.setattr(Replicas, "num_model_replicas", replicas)
    found = []
    for number in range(4):
        processes(4, number)
        found.append(Replicas(mesh).data_shard_id)
    assert found == parts
    assert Replicas(mesh).num_data_shards == min(replicas, 4)


def test_base_rejects_what_is_no_mesh_or_axis(mesh):
    with pytest.raises(ValueError, match="Expect `device_mesh` to be an instance of DeviceMesh, got tuple"):
        Distribution((8,))  # pyright: ignore
    with pytest.raises(ValueError, match=r"batch_dim_name: Unknown mesh axis 'dat'.*Did you mean 'data'"):
        Distribution(mesh, "dat")


# DataParallel


def test_data_parallel_on_a_mesh(line, processes):
    processes(2)
    value = DataParallel(device_mesh=line)
    assert value.device_mesh is line
    assert value.batch_dim_name == "data"
    assert value.auto_shard_dataset
    assert (value.num_processes, value.num_model_replicas, value.num_data_shards) == (2, 8, 2)


@pytest.mark.parametrize("arguments", [{}, {"devices": [f"cpu:{number}" for number in range(8)]}])
def test_data_parallel_makes_its_mesh(arguments):
    value = DataParallel(**arguments, auto_shard_dataset=False)
    assert (value.device_mesh.shape, value.device_mesh.axis_names) == ((8,), ["batch"])
    assert value.batch_dim_name == "batch"
    assert not value.auto_shard_dataset


def test_data_parallel_layouts(line):
    value = DataParallel(line)
    data_layout = value.get_data_layout(np.arange(8 * 3 * 5).reshape(8, 3, 5).shape)
    assert data_layout.axes == ("data", None, None)
    assert data_layout.device_mesh is line
    assert value.get_variable_layout(BIAS) == TensorLayout((None,), line)
    assert value.get_tensor_layout("/model/layer/tensor") is None


def test_an_own_layout_wins(line, mesh, rules):
    own = TensorLayout((None, "model"), mesh)
    variable = SimpleNamespace(path="dense/bias", shape=(8, 4), _layout=own)
    assert ModelParallel(layout_map=rules).get_variable_layout(variable) is own
    assert DataParallel(line).get_variable_layout(variable) is own


def test_data_parallel_warns_of_more_axes(mesh):
    with pytest.warns(UserWarning, match="Expect the input mesh to be 1D.*Only mesh axis 'data' splits the batch"):
        value = DataParallel(mesh)
    assert value.batch_dim_name == "data"


def test_data_parallel_on_canonical_axes(canonical):
    assert DataParallel(DeviceMesh.of(data=8)).batch_dim_name == "data"
    with pytest.warns(UserWarning, match="Only mesh axis 'data'"):
        DataParallel(canonical)


def test_data_parallel_rejects_what_is_no_mesh():
    with pytest.raises(ValueError, match=r"Expect `mesh` to be an instance of `DeviceMesh`.*devices=\[...\]"):
        DataParallel(["cpu:0"])  # pyright: ignore


def test_a_scalar_has_no_rows(line):
    with pytest.raises(ValueError, match=r"Data of shape \(\) has no dim 0 to split over mesh axis 'data'"):
        DataParallel(line).get_data_layout(())


def test_data_parallel_table(line):
    table = DataParallel(line).layout_table({"w": np.zeros((1 << 10, 1 << 10), np.float32)})
    assert (table.row("w").rule, table.bytes_per_device) == ("data parallel", 1 << 22)


# ModelParallel


def test_model_parallel_layouts(mesh, rules):
    value = ModelParallel(layout_map=rules, batch_dim_name="data")
    assert value.device_mesh is mesh
    assert value.layout_map is rules
    assert value.get_variable_layout(KERNEL).axes == (None, "model")
    assert value.get_variable_layout(BIAS).axes == ("model",)
    assert value.get_variable_layout(SEED).axes == (None,)  # no rule
    assert value.get_variable_layout(np.zeros((8, 4)), "dense_2/kernel").axes == (None, "model")  # path next to it
    assert value.get_data_layout((2, 3, 4)).axes == ("data", None, None)
    assert value.get_tensor_layout("/model/layer/tensor").axes == ("data", None)
    assert value.get_tensor_layout("/model/layer/other_tensor") is None


def test_model_parallel_needs_a_path(rules):
    with pytest.raises(ValueError, match=r"The variable has no path.*get_variable_layout\(x, path\)"):
        ModelParallel(layout_map=rules).get_variable_layout(np.zeros(3))


def test_model_parallel_batch_axis(rules):
    assert ModelParallel(layout_map=rules).batch_dim_name == "data"  # the first
    assert ModelParallel(layout_map=LayoutMap(DeviceMesh.of(data=2, tensor=4))).num_model_replicas == 2
    with pytest.raises(ValueError, match=r"Unknown mesh axis 'nope'; known: data, model"):
        ModelParallel(layout_map=rules, batch_dim_name="nope")


def test_model_parallel_needs_rules(mesh, rules):
    with pytest.raises(ValueError, match="You must specify a layout_map argument"):
        ModelParallel()
    with pytest.raises(ValueError, match="Argument `layout_map` must be a `LayoutMap` instance"):
        ModelParallel(layout_map={".*kernel": (None, "model")})  # pyright: ignore
    with pytest.raises(TypeError, match="positional"):
        ModelParallel(rules)  # pyright: ignore


def test_model_parallel_rejects_unknown_keywords(rules):
    with pytest.raises(TypeError, match="batch_dim"):
        ModelParallel(layout_map=rules, batch_dim="data")  # pyright: ignore


def test_model_parallel_has_the_mesh_of_its_rules(mesh, rules):
    assert ModelParallel(layout_map=rules, device_mesh=mesh).device_mesh is mesh
    with pytest.raises(ValueError, match="is not the mesh of layout_map"):
        ModelParallel(layout_map=rules, device_mesh=DeviceMesh((8,), ("data",)))


def test_model_parallel_processes(processes):
    processes(4)
    uneven = LayoutMap(DeviceMesh((3, 2), ("data", "model"), [f"cpu:{number}" for number in range(6)]))
    with pytest.raises(ValueError, match=r"`num_processes` must be divisible by `num_model_replicas`: 4 % 3 = 1"):
        ModelParallel(layout_map=uneven, batch_dim_name="data")
    processes(2)
    value = ModelParallel(layout_map=LayoutMap(DeviceMesh((4, 2), ("data", "model"))))
    assert (value.num_model_replicas, value.num_processes, value.num_data_shards) == (4, 2, 2)


def test_model_parallel_table(rules):
    del rules["/model/layer/tensor"]
    params = {"dense": {"kernel": np.zeros((8, 4)), "bias": np.zeros(4)}, "other": np.zeros(4)}
    table = ModelParallel(layout_map=rules).layout_table(params)
    assert [row.rule for row in table.rows][:2] == [".*bias", ".*kernel"]
    with pytest.raises(LayoutError, match="'other'"):
        ModelParallel(layout_map=rules).layout_table(params, unmatched_floor_bytes=1)


# Every device a process of its own: same replica, same part of the data


@pytest.mark.parametrize("number", range(8))
def test_one_process_per_device(processes, number):
    mesh = DeviceMesh((4, 2), ("data", "model"))
    processes(8, number)
    value = ModelParallel(layout_map=LayoutMap(mesh), batch_dim_name="data")
    row = int(np.argwhere(mesh.devices == f"cpu:{number}")[0][0])
    assert value.data_shard_id == row
    assert value.num_data_shards == 4
