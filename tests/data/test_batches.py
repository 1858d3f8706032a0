"""Batches: the same content for any mesh and any number of processes, resumable by a seek, padded exactly."""

import threading
import time

import jax
import numpy as np
import pytest
import spmdkit.data.batches as batches_module
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from spmdkit.data import BadDataError, DataConfig, abstract_batch, eval_batches, from_arrays, open_splits, train_batches


def numbered(rows=50, length=3):
    """Examples whose values tell their row."""
    inputs = np.arange(rows * length, dtype=np.int32).reshape(rows, length)
    return from_arrays({"inputs": inputs, "targets": inputs + 1}).train


def on_mesh(source, sharding, **options):
    defaults = {"global_batch": 8, "seed": 3, "start_step": 0, "num_steps": 12}
    return train_batches(source, sharding, **(defaults | options))


def run(source, sharding, **options):
    return [jax.device_get(batch) for batch in on_mesh(source, sharding, **options)]


def same(ours, theirs):
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, other)


def test_examples_are_counted_over_all_epochs(sharding):
    """Up to 2**31, where they begin anew: no two samples of a run, and so no masks, are alike before that."""
    for start_step in (10**4, 2**28 - 1):
        batch = next(on_mesh(numbered(), sharding, start_step=start_step, num_steps=1, prefetch=0))
        assert batch["example"].tolist() == [(start_step * 8 + row) % 2**31 for row in range(8)]
    batch = next(on_mesh(numbered(), sharding, start_step=2**28, num_steps=1, prefetch=0))
    assert batch["example"].tolist() == list(range(8))


def test_what_a_batch_holds(sharding):
    batch = next(train_batches(numbered(), sharding, global_batch=16, seed=0, start_step=2, num_steps=1))
    assert {name: (array.shape, str(array.dtype)) for name, array in batch.items()} == {
        "inputs": ((16, 3), "int32"),
        "targets": ((16, 3), "int32"),
        "weights": ((16, 3), "float32"),
        "example": ((16,), "int32"),
    }
    assert all(array.sharding == sharding and array.committed for array in batch.values())
    assert batch["example"].tolist() == list(range(32, 48))
    assert np.array_equal(batch["inputs"] + 1, batch["targets"])


def test_each_epoch_visits_every_example_once(sharding):
    rows = np.concatenate([batch["inputs"][:, 0] // 3 for batch in run(numbered(48), sharding)])
    first, second = rows[:48], rows[48:]
    assert np.array_equal(np.sort(first), np.arange(48))
    assert np.array_equal(np.sort(second), np.arange(48))
    assert not np.array_equal(first, second)


def test_a_batch_may_span_epochs(sharding):
    rows = np.concatenate([batch["inputs"][:, 0] // 3 for batch in run(numbered(20), sharding, num_steps=5)])
    assert np.array_equal(np.bincount(rows), np.full(20, 2))


@pytest.mark.parametrize("start", [1, 6, 11, 12])
def test_starting_at_a_step_is_a_seek(sharding, start):
    whole = run(numbered(), sharding)
    same(run(numbered(), sharding, start_step=start, num_steps=12 - start), whole[start:])


@pytest.mark.parametrize("options", [{"prefetch": 0}, {"prefetch": 5}, {"threads": 3}, {"threads": 2, "prefetch": 0}])
def test_threads_change_nothing(sharding, options):
    same(run(numbered(), sharding, **options), run(numbered(), sharding))


@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_the_mesh_changes_nothing(sharding, num_devices):
    mesh = Mesh(np.array(jax.devices()[-num_devices:]), ("data",), axis_types=(AxisType.Auto,))
    same(run(numbered(), NamedSharding(mesh, PartitionSpec("data"))), run(numbered(), sharding))


def test_seeds_differ_and_shuffling_can_be_turned_off(sharding):
    assert not np.array_equal(run(numbered(), sharding)[0]["inputs"], run(numbered(), sharding, seed=4)[0]["inputs"])
    plain = run(numbered(), sharding, shuffle=False)
    assert np.concatenate([batch["inputs"][:, 0] // 3 for batch in plain])[:50].tolist() == list(range(50))


def test_the_sample_index_wraps_where_int32_ends(sharding):
    (batch,) = run(numbered(), sharding, start_step=2**28, num_steps=1)
    assert batch["example"].tolist() == list(range(8))


class PretendProcess:
    """A sharding that says just some of the mesh's devices are of this process."""

    def __init__(self, sharding, devices):
        self.real = sharding
        self.addressable_devices = set(devices)

    def __getattr__(self, name):
        return getattr(self.real, name)


class Recording:
    """A source that notes which examples were read."""

    def __init__(self, source):
        self.source = source
        self.read = []

    def __len__(self):
        return len(self.source)

    def __getitem__(self, index):
        self.read.append(index)
        return self.source[index]


@pytest.mark.parametrize("num_processes", [1, 2, 4])
@pytest.mark.parametrize("axis_names", [("data", "fsdp"), ("data", "tensor"), ("tensor", "data")])
def test_pretend_processes_read_their_rows_alone_and_make_the_same_batches(num_processes, axis_names, monkeypatch):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), axis_names, axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec(tuple(name for name in axis_names if name != "tensor")))
    monkeypatch.setattr(batches_module, "place_rows", lambda local, rows, **rest: {**local, "rows": rows})
    whole = run(numbered(), sharding)
    for devices in np.array_split(np.array(jax.devices()), num_processes):
        source = Recording(numbered())
        parts = run(source, PretendProcess(sharding, devices), prefetch=0)
        num_rows = len(parts[0]["rows"])
        assert len(source.read) == 12 * num_rows  # each row once, however many devices hold it
        for part, batch in zip(parts, whole, strict=True):
            for name in ("inputs", "targets", "weights", "example"):
                assert np.array_equal(part[name], batch[name][part["rows"]])
    expected = {("data", "fsdp"): 8 // num_processes, ("data", "tensor"): 8 // min(2, num_processes)}
    assert num_rows == expected.get(axis_names, 8 if num_processes < 4 else 4)


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 16, 30])
def test_evaluation_pads_with_weight_zero(sharding, rows):
    batches = [jax.device_get(batch) for batch in eval_batches(numbered(rows), sharding, global_batch=8)]
    assert len(batches) == -(-rows // 8)
    weights = np.concatenate([batch["weights"] for batch in batches])
    assert weights.sum() == rows * 3
    assert np.array_equal(weights[:, 0], np.arange(len(weights)) < rows)
    inputs = np.concatenate([batch["inputs"] for batch in batches])
    assert np.array_equal(inputs[:rows], np.arange(rows * 3).reshape(rows, 3))
    assert np.array_equal(inputs[rows:], np.repeat(inputs[rows - 1 : rows], len(inputs) - rows, axis=0))
    assert np.concatenate([batch["example"] for batch in batches]).tolist() == list(range(len(inputs)))


def test_evaluation_does_not_touch_the_source(sharding):
    source = numbered(5)
    list(eval_batches(source, sharding, global_batch=8))
    assert source[4]["weights"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(("max_batches", "expected"), [(None, 4), (2, 2), (9, 4), (0, 0)])
def test_evaluation_may_stop_early(sharding, max_batches, expected):
    assert len(list(eval_batches(numbered(30), sharding, global_batch=8, max_batches=max_batches))) == expected


@pytest.mark.parametrize("x64", [False, True])
def test_the_abstract_batch_is_like_the_real_one(sharding, x64, request):
    if x64:
        request.getfixturevalue("float64")
    source = from_arrays({"inputs": np.zeros((20, 2, 5)), "targets": np.arange(20)}).train
    batch = next(train_batches(source, sharding, global_batch=8, seed=0, start_step=0, num_steps=1))
    abstract = abstract_batch(source, 8, sharding)
    assert {name: (x.shape, x.dtype, x.sharding) for name, x in batch.items()} == {
        name: (x.shape, x.dtype, x.sharding) for name, x in abstract.items()
    }
    assert str(abstract["inputs"].dtype) == ("float64" if x64 else "float32")


def test_the_abstract_batch_needs_no_devices():
    mesh = AbstractMesh((512, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    abstract = abstract_batch(numbered(), 1024, NamedSharding(mesh, PartitionSpec("data")))
    assert abstract["inputs"].shape == (1024, 3)
    assert abstract["example"].dtype == np.int32


def test_batches_feed_a_jitted_step_without_recompiling(sharding):
    traced = []

    @jax.jit
    def step(batch):
        traced.append(1)
        return (batch["inputs"] * batch["weights"].astype(int)).sum()

    total = sum(int(step(batch)) for batch in on_mesh(numbered(48), sharding, num_steps=6))
    assert total == np.arange(48 * 3).sum()
    assert len(traced) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"global_batch": 56},
            r"train\.global_batch=56 rows, but the training split holds 50 examples\. Set .* at most 50",
        ),
        ({"global_batch": 9}, r"train\.global_batch=9 rows cannot be split over the mesh axes data 2 x fsdp 4"),
        ({"seed": -1}, r"seed=-1, start_step=0 and num_steps=12 must be 0 or more"),
        ({"start_step": -1}, "start_step=-1"),
    ],
)
def test_mistakes_are_raised_at_the_call(sharding, options, message):
    with pytest.raises(ValueError, match=message):
        on_mesh(numbered(), sharding, **options)


@pytest.mark.parametrize("threads", [0, 2])
def test_bad_data_reaches_the_loop(tmp_path, sharding, threads):
    ids = np.zeros(1001, np.uint16)
    ids[900] = 77
    np.save(tmp_path / "t.npy", ids)
    config = DataConfig(source="tokens", files=(f"{tmp_path}/t.npy",), length=10, vocabulary=50, eval_fraction=0.0)
    batches = on_mesh(open_splits(config).train, sharding, shuffle=False, threads=threads)
    with pytest.raises(BadDataError, match="token id 77"):
        list(batches)


@pytest.mark.parametrize("threads", [0, 2])
def test_closing_stops_every_thread(sharding, threads):
    before = set(threading.enumerate())
    batches = on_mesh(numbered(), sharding, num_steps=10**9, threads=threads)
    next(batches)
    assert len(set(threading.enumerate()) - before) >= 1
    batches.close()
    deadline = time.monotonic() + 10
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(threading.enumerate()) - before == set()


@pytest.mark.parametrize("start", [0, 4])
def test_later_batches_move_up_where_some_are_left_out(sharding, start):
    """Samples keep their numbers, and with them their masks."""
    whole = run(numbered(), sharding, num_steps=9)
    found = run(numbered(), sharding, start_step=start, num_steps=6 - start, left_out=(1, 3, 8))
    same(found, [whole[number] for number in (0, 2, 4, 5, 6, 7)[start:]])


def test_too_few_rows_are_told_what_gives_more(tmp_path):
    """Shorter examples are more examples only if they are cut out of tokens."""
    with pytest.raises(ValueError, match=r"holds 4 examples\. Set train\.global_batch to at most 4, or give more data"):
        batches_module.check_enough(from_arrays({"inputs": np.zeros((4, 2))}).train, 8)
    (tmp_path / "a.txt").write_text("a b c " * 10)
    text = open_splits(DataConfig(source="text", files=(str(tmp_path / "a.txt"),), length=20, eval_fraction=0))
    with pytest.raises(ValueError, match=r"at most 3, lower data\.length, or give more data"):
        batches_module.check_enough(text.train, 8)
