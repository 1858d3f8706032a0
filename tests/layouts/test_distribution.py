"""DataParallel, ModelParallel and the process's distribution."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from spmdkit.layouts import (
    DataParallel,
    Distribution,
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


def test_scopes_nest_and_restore(line, rules):
    outer, inner = DataParallel(line), ModelParallel(layout_map=rules)
    assert distribution() is None
    with outer.scope():
        assert distribution() is outer
        with inner.scope():
            assert distribution() is inner
        with pytest.raises(KeyError), inner.scope():
            raise KeyError
        assert distribution() is outer
    assert distribution() is None
    set_distribution(outer)
    assert distribution() is outer
    set_distribution(None)
    assert distribution() is None


@pytest.mark.parametrize(
    ("do", "message"),
    [
        (lambda rules: set_distribution("fsdp"), r"takes a DataParallel, a ModelParallel or None, got 'fsdp' \(str\)"),
        (lambda rules: Distribution((8,)), "Expect `device_mesh` to be an instance of DeviceMesh, got tuple"),
        (lambda rules: DataParallel(["cpu:0"]), r"an instance of DeviceMesh, got list.*devices=\[...\]"),
        (lambda rules: DataParallel().get_data_layout(()), r"Data of shape \(\) has no dim 0 .* mesh axis 'batch'"),
        (lambda rules: ModelParallel(), "You must specify a layout_map argument"),
        (lambda rules: ModelParallel(layout_map={}), "Argument `layout_map` must be a `LayoutMap` instance"),
        (
            lambda rules: ModelParallel(layout_map=rules, device_mesh=DeviceMesh((8,), ("data",))),
            "is not the mesh of layout_map",
        ),
        (
            lambda rules: ModelParallel(layout_map=rules, batch_dim_name="dat"),
            r"batch_dim_name: Unknown mesh axis 'dat'; known: data, model.* Did you mean 'data'",
        ),
        (
            lambda rules: ModelParallel(layout_map=rules).get_variable_layout(np.zeros(3)),
            r"The variable must have a path.*get_variable_layout\(x, path\)",
        ),
    ],
)
def test_rejects_invalid_arguments(rules, do, message):
    with pytest.raises(ValueError, match=message):
        do(rules)


@pytest.mark.parametrize(("replicas", "parts"), [(8, [0, 1, 2, 3]), (4, [0, 1, 2, 3]), (2, [0, 0, 1, 1]), (1, [0] * 4)])
def test_processes_of_one_replica_read_the_same(processes, replicas, parts):
    rules, found = LayoutMap(DeviceMesh((replicas, 8 // replicas), ("data", "model"))), []
    for number in range(4):
        processes(4, number)
        found.append(ModelParallel(layout_map=rules).data_shard_id)
    assert found == parts
    assert ModelParallel(layout_map=rules).num_data_shards == min(replicas, 4)


@pytest.mark.parametrize("arguments", [{}, {"devices": [f"cpu:{number}" for number in range(8)]}])
def test_data_parallel_makes_its_mesh(arguments):
    value = DataParallel(**arguments, auto_shard_dataset=False)
    assert (value.device_mesh.shape, value.device_mesh.axis_names) == ((8,), ["batch"])
    assert value.batch_dim_name == "batch"
    assert not value.auto_shard_dataset


def test_data_parallel_layouts(line, processes):
    processes(2)
    value = DataParallel(device_mesh=line)
    assert value.device_mesh is line
    assert (value.num_processes, value.num_model_replicas, value.num_data_shards) == (2, 8, 2)
    data_layout = value.get_data_layout((8, 3, 5))
    assert data_layout.axes == ("data", None, None)
    assert data_layout.device_mesh is line
    assert value.get_variable_layout(BIAS) == TensorLayout((None,), line)
    assert value.get_tensor_layout("/model/layer/tensor") is None


def test_an_own_layout_wins(line, mesh, rules):
    own = TensorLayout((None, "model"), mesh)
    variable = SimpleNamespace(path="dense/bias", shape=(8, 4), _layout=own)
    assert ModelParallel(layout_map=rules).get_variable_layout(variable) is own
    assert DataParallel(line).get_variable_layout(variable) is own


def test_data_parallel_warns_of_more_axes(mesh, canonical):
    assert DataParallel(DeviceMesh.of(data=8)).batch_dim_name == "data"
    for other in (mesh, canonical):
        with pytest.warns(UserWarning, match="Expect the input mesh to be 1D.*Only mesh axis 'data' splits the batch"):
            assert DataParallel(other).batch_dim_name == "data"


def test_model_parallel_layouts(mesh, rules):
    value = ModelParallel(layout_map=rules, device_mesh=mesh)
    assert value.device_mesh is mesh
    assert value.layout_map is rules
    assert value.batch_dim_name == "data"  # the first
    assert ModelParallel(layout_map=LayoutMap(DeviceMesh.of(data=2, tensor=4))).num_model_replicas == 2
    assert value.get_variable_layout(KERNEL).axes == (None, "model")
    assert value.get_variable_layout(BIAS).axes == ("model",)
    assert value.get_variable_layout(SEED).axes == (None,)  # no rule
    assert value.get_variable_layout(np.zeros((8, 4)), "dense_2/kernel").axes == (None, "model")  # path next to it
    assert value.get_variable_layout(SEED, BIAS.path).axes == ("model",), "the given path counts"
    assert value.get_data_layout((2, 3, 4)).axes == ("data", None, None)
    assert value.get_tensor_layout("/model/layer/tensor").axes == ("data", None)
    assert value.get_tensor_layout("/model/layer/other_tensor") is None


def test_processes_and_replicas_must_divide(processes):
    processes(4)
    uneven = LayoutMap(DeviceMesh((3, 2), ("data", "model"), [f"cpu:{number}" for number in range(6)]))
    with pytest.raises(ValueError, match=r"`num_processes` must be divisible by `num_model_replicas`: 4 % 3 = 1"):
        ModelParallel(layout_map=uneven, batch_dim_name="data")
