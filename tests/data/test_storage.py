"""A batch that is stored in another layout is the same batch; each value is read and sent once."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from runs import losses, write_config
from spmdkit.data import bucket_by_length, eval_batches, from_arrays, from_dataset, train_batches
from spmdkit.data.batches import check_layout
from spmdkit.data.storage import Storage
from spmdkit.launch.cli import main
from spmdkit.mesh.device_mesh import DeviceMesh
from spmdkit.mesh.errors import UserError
from spmdkit.parallel.xla.census import census

ROWS, LENGTH = 16, 12
OVER_ALL = {".*": [["data", "context", "tensor"]]}
POSITIONS = {"inputs|targets|weights": [["data"], "context"], "example": [["data", "context"]]}
SIZES = {"data": 2, "context": 2, "tensor": 2}


@pytest.fixture
def mesh():
    return DeviceMesh.of(**SIZES)


@pytest.fixture
def step(mesh):
    return NamedSharding(mesh.backend_mesh, PartitionSpec("data"))


@pytest.fixture
def source():
    inputs = np.arange(50 * LENGTH, dtype=np.int32).reshape(50, LENGTH)
    return from_arrays({"inputs": inputs, "targets": inputs + 1}).train


def batches(source, step, layout):
    options = {"global_batch": ROWS, "layout": layout}
    yield from train_batches(source, step, seed=3, start_step=2, num_steps=3, **options)
    yield from eval_batches(source, step, **options)


@pytest.mark.parametrize("layout", [OVER_ALL, POSITIONS, {"inputs": [None, "tensor"]}, {"inputs": ["context", "data"]}])
def test_batches_are_those_of_no_layout(layout, source, step):
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
def test_one_program_gathers_what_was_split_further(layout, expected, mesh, step):
    storage = Storage(layout, step)
    shapes = {"inputs": (ROWS, LENGTH), "targets": (ROWS, LENGTH), "weights": (ROWS, LENGTH), "example": (ROWS,)}
    stored = {
        name: jax.ShapeDtypeStruct(shape, np.float32, sharding=storage.sharding(name, shape))
        for name, shape in shapes.items()
    }
    found = census(storage.move.lower(stored).compile().as_text() or "", mesh)
    assert {(each.kind, each.axes): each.bytes for each in found} == expected


def test_each_value_is_sent_to_one_device_and_each_row_read_by_one_process(step, source):
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
        ({"inputs": ["data", "contxt"]}, "names the axis contxt; the mesh has .*Did you mean context"),
        ({"inputs": ["data", "data"]}, "names the axis data twice; an axis splits one dim, once"),
        (
            {"inputs": [None, ["data", "context", "tensor"]]},
            "splits dim 1 of inputs (16, 12) over .* = 8 parts: 12 %",
        ),
        (
            {"input": ["data"]},
            "'input' meets no array of a batch (example, inputs, targets, weights). Did you mean inputs",
        ),
        ({".*": ["data", None, None]}, r"['.*'] has 3 entries, but \w+ has 2 dims. Give at most one entry per dim"),
        ({"(": ["data"]}, "'(' is no regular expression"),
        ({"inputs": 5}, "data.layout['inputs'] = 5 is no list of axes. Give regular expressions"),
        ({"inputs": "data"}, "data.layout['inputs'] = 'data' is no list of axes"),
        ({"inputs": [1]}, "data.layout['inputs'] = [1] is no list of axes"),
        ({"inputs": [["data", 1]]}, "is no list of axes"),
        ({5: ["data"]}, "the key 5 is no text"),
        ([["data"]], "data.layout=[['data']] is no mapping"),
    ],
)
def test_what_is_no_layout(layout, message, source, step):
    with pytest.raises(UserError) as caught:
        train_batches(source, step, global_batch=ROWS, seed=0, start_step=0, num_steps=1, layout=layout)
    assert re.search(re.sub(r"[][()]", lambda found: rf"\{found[0]}", message), str(caught.value))
    assert "data.layout" in str(caught.value)


@pytest.mark.slow
def test_a_run_trains_as_without(tmp_path):
    """Rows over `data` and features over `fsdp`, which the step both splits rows over."""
    config = str(write_config(tmp_path, train={"steps": 4, "global_batch": 16}))
    assert main(["train", config]) == 0
    assert main(["train", config, "data.layout={inputs: [data, fsdp]}", f"run.dir={tmp_path}/stored"]) == 0
    assert losses(tmp_path / "stored") == losses(tmp_path / "run")


def test_a_layout_has_to_hold_for_every_length():
    """Of the lengths 8 and 6, the longest would divide."""
    rows = [(np.arange(length), np.arange(length)) for length in (8, 6) for _ in range(8)]
    splits = bucket_by_length(from_dataset(rows), lengths=(6, 8))
    devices = DeviceMesh.of(data=2, context=4).backend_mesh
    with pytest.raises(UserError, match=r"splits dim 1 of inputs \(8, 6\) over context = 4 parts: 6 % 4 = 2"):
        check_layout(splits.train, 8, NamedSharding(devices, PartitionSpec("data")), {"inputs": [None, "context"]})
