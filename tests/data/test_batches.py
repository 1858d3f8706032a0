"""Batches: the same content for any mesh and any number of processes, resumable by a seek, padded exactly."""

import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from spmdkit.data import (
    DataConfig,
    abstract_batch,
    eval_batches,
    from_arrays,
    from_examples,
    open_splits,
    train_batches,
)
from spmdkit.data.batches import check_enough, check_form, exactly, prefetch_items
from spmdkit.data.placement import Storage
from spmdkit.mesh.errors import UserError


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


def test_numbers_examples_over_all_epochs(sharding):
    """Up to 2**31, where they begin anew: no two samples of a run, and so no masks, are alike before that."""
    for start_step in (10**4, 2**28 - 1):
        batch = next(on_mesh(numbered(), sharding, start_step=start_step, num_steps=1, prefetch=0))
        assert batch["example"].tolist() == [(start_step * 8 + row) % 2**31 for row in range(8)]
    batch = next(on_mesh(numbered(), sharding, start_step=2**28, num_steps=1, prefetch=0))
    assert batch["example"].tolist() == list(range(8))


def test_batch_has_shapes_dtypes_and_rows(sharding):
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


@pytest.mark.parametrize("start", [1, 6, 11, 12])
def test_start_step_seeks(sharding, start):
    whole = run(numbered(), sharding)
    same(run(numbered(), sharding, start_step=start, num_steps=12 - start), whole[start:])


@pytest.mark.parametrize("options", [{"prefetch": 0}, {"prefetch": 5}, {"threads": 3}, {"threads": 2, "prefetch": 0}])
def test_threads_and_prefetch_keep_batches(sharding, options):
    same(run(numbered(), sharding, **options), run(numbered(), sharding))


@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_mesh_keeps_batches(sharding, num_devices):
    mesh = Mesh(np.array(jax.devices()[-num_devices:]), ("data",), axis_types=(AxisType.Auto,))
    same(run(numbered(), NamedSharding(mesh, PartitionSpec("data"))), run(numbered(), sharding))


def test_seed_and_shuffle_select_the_order(sharding):
    assert not np.array_equal(run(numbered(), sharding)[0]["inputs"], run(numbered(), sharding, seed=4)[0]["inputs"])
    plain = run(numbered(), sharding, shuffle=False)
    assert np.concatenate([batch["inputs"][:, 0] // 3 for batch in plain])[:50].tolist() == list(range(50))


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
def test_processes_read_only_their_rows(num_processes, axis_names, monkeypatch):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), axis_names, axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec(tuple(name for name in axis_names if name != "tensor")))
    monkeypatch.setattr(Storage, "place", lambda self, local, rows, global_batch: {**local, "rows": rows})
    monkeypatch.setattr(Storage, "to_step", lambda self, batch: batch)
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


def test_processes_keep_their_rows_of_a_stream(sharding, monkeypatch):
    monkeypatch.setattr(Storage, "place", lambda self, local, rows, global_batch: {**local, "rows": rows})
    monkeypatch.setattr(Storage, "to_step", lambda self, batch: batch)

    def stream():
        return from_examples(lambda epoch: ({"inputs": np.full(2, row)} for row in range(20))).train

    whole = run(stream(), sharding)
    for devices in np.array_split(np.array(jax.devices()), 2):
        for part, batch in zip(run(stream(), PretendProcess(sharding, devices)), whole, strict=True):
            assert len(part["rows"]) == 4
            assert np.array_equal(part["inputs"], batch["inputs"][part["rows"]])


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


class KeepsItsArrays:
    """A source that returns its own arrays instead of copies."""

    arrays = {"inputs": np.zeros((8, 2), np.float32), "weights": np.ones(8, np.float32)}  # noqa: RUF012

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return {name: array[index] for name, array in self.arrays.items()}

    def take(self, indices):
        return self.arrays


def test_evaluation_does_not_change_the_source(sharding):
    (batch,) = eval_batches(KeepsItsArrays(), sharding, global_batch=8)
    assert np.asarray(batch["weights"]).tolist() == [1] * 5 + [0] * 3
    assert KeepsItsArrays.arrays["weights"].all()


@pytest.mark.parametrize("x64", [False, True])
def test_abstract_batch_matches_the_real_one(sharding, x64, request):
    if x64:
        request.getfixturevalue("float64")
    source = from_arrays({"inputs": np.zeros((20, 2, 5)), "targets": np.arange(20)}).train
    batch = next(train_batches(source, sharding, global_batch=8, seed=0, start_step=0, num_steps=1))
    abstract = abstract_batch(source, 8, sharding)
    assert {name: (x.shape, x.dtype, x.sharding) for name, x in batch.items()} == {
        name: (x.shape, x.dtype, x.sharding) for name, x in abstract.items()
    }
    assert str(abstract["inputs"].dtype) == ("float64" if x64 else "float32")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"global_batch": 56},
            r"train\.global_batch=56 rows, but the training split has only 50 examples\. Set .* at most 50",
        ),
        ({"global_batch": 9}, r"train\.global_batch=9 rows cannot be split over the mesh axes data 2 x fsdp 4"),
        ({"seed": -1}, r"seed=-1, start_step=0 and num_steps=12 must be 0 or more"),
        ({"start_step": -1}, "start_step=-1"),
    ],
)
def test_rejects_invalid_arguments_at_the_call(sharding, options, message):
    with pytest.raises(ValueError, match=message):
        on_mesh(numbered(), sharding, **options)


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


def numbers(made, closed):
    try:
        for number in range(9):
            made.append(number)
            yield number
    finally:
        closed.append(threading.current_thread().name)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_prefetches_at_most_depth_items(depth):
    made, closed = [], []
    items = prefetch_items(numbers(made, closed), depth)
    assert made == []
    assert next(items) == 0
    deadline = time.monotonic() + 10
    while len(made) < 1 + depth and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.05)
    assert len(made) == 1 + depth
    waiting = prefetch_items(numbers([], closed_early := []), depth)
    next(waiting)
    time.sleep(0.05)  # its thread waits for the next request
    waiting.close()
    assert len(closed_early) == 1
    assert list(items) == list(range(1, 9))
    assert closed == ["spmdkit-prefetch" if depth else "MainThread"]


class Failing:
    """A source that calls a function at its third batch."""

    def __init__(self, fail):
        self.fail, self.rows = fail, numbered()

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        if index >= 16:
            self.fail()
        return self.rows[index]


@pytest.mark.parametrize("options", [{"prefetch": 0}, {}, {"threads": 2}], ids=["on demand", "prefetch", "threads"])
@pytest.mark.parametrize("error", [OSError("disk on fire"), SystemExit(7)])
def test_raises_errors_and_exits_of_readers_at_their_step(sharding, error, options):
    def fail():
        raise error

    batches = on_mesh(Failing(fail), sharding, shuffle=False, **options)
    for _ in range(2):
        next(batches)
    with pytest.raises(type(error), match=str(error)):
        next(batches)


@pytest.mark.parametrize("options", [{"prefetch": 0}, {}, {"threads": 2}], ids=["on demand", "prefetch", "threads"])
def test_a_StopIteration_of_a_reader_is_an_error_at_its_step(sharding, options):
    def bare_next():
        next(iter(()))

    batches = on_mesh(Failing(bare_next), sharding, shuffle=False, **options)
    for _ in range(2):
        next(batches)
    with pytest.raises(UserError, match=r"reading examples of Failing .* fails in .*\(next\(iter\(\(\)\)\)\)"):
        next(batches)


def test_an_evaluation_never_ends_early(sharding):
    source = Failing(lambda: next(iter(())))
    with pytest.raises(UserError, match="StopIteration"):
        list(eval_batches(source, sharding, global_batch=8))


def test_batches_that_end_early_are_an_error():
    assert list(exactly(iter([{}, {}]), 2)) == [{}, {}]
    with pytest.raises(UserError, match="The data ended after 2 of 3 batches without an error"):
        list(exactly(iter([{}, {}]), 3))


def test_rejects_batches_unlike_the_first_example(sharding):
    expected = [abstract_batch(numbered(length=length), 8, sharding) for length in (3, 5)]
    (batch,) = on_mesh(numbered(length=5), sharding, num_steps=1)
    check_form(batch, expected)
    with pytest.raises(
        UserError, match=r"The first example of the training split is .*\(3,\).*first batch are .*\(5,\)"
    ):
        check_form(batch, expected[:1])


def test_rejects_rows_that_change_their_form(sharding):
    class Wider(Failing):
        def __getitem__(self, index):
            row = self.rows[index]
            return {**row, "inputs": np.zeros(7)} if index >= 16 else row

    batches = on_mesh(Wider(None), sharding, shuffle=False)
    with pytest.raises(UserError, match=r"Wider .*: examples are .* at first, and .*\(7,\)\).* from example 16 of the"):
        list(batches)


def test_closing_does_not_wait_for_a_reader_that_hangs(sharding, monkeypatch):
    monkeypatch.setattr("spmdkit.data.batches.JOIN_SECONDS", 0.1)
    reads, released = threading.Event(), threading.Event()

    def hang():
        reads.set()
        released.wait()

    batches = on_mesh(Failing(hang), sharding, shuffle=False)
    next(batches)
    assert reads.wait(10)
    began = time.monotonic()
    batches.close()
    assert time.monotonic() - began < 5
    released.set()


@pytest.mark.slow
def test_program_exits_without_closing():
    code = (
        "import numpy as np, jax, spmdkit\nfrom jax.sharding import *\n"
        "x = np.zeros((99, 2))\nmesh = Mesh(np.array(jax.devices()), ('data',))\n"
        "batches = spmdkit.train_batches(spmdkit.data.from_arrays({'inputs': x}).train, "
        "NamedSharding(mesh, PartitionSpec('data')), global_batch=8, seed=0, start_step=0, num_steps=10**6)\n"
        "print(next(batches)['inputs'].shape)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "(8, 2)\n", "")


@pytest.mark.parametrize("start", [0, 4])
def test_later_batches_replace_those_left_out(sharding, start):
    """Samples keep their numbers, and with them their masks."""
    whole = run(numbered(), sharding, num_steps=9)
    found = run(numbered(), sharding, start_step=start, num_steps=6 - start, left_out=(1, 3, 8))
    same(found, [whole[number] for number in (0, 2, 4, 5, 6, 7)[start:]])


def test_too_few_rows_error_contains_the_fix(tmp_path):
    """Shorter examples are more examples only if they are cut out of tokens."""
    check_enough(from_arrays({"inputs": np.zeros((4, 2))}).train, 4)
    with pytest.raises(ValueError, match=r"only 4 examples\. Set train\.global_batch to at most 4, or give more data"):
        check_enough(from_arrays({"inputs": np.zeros((4, 2))}).train, 8)
    (tmp_path / "a.txt").write_text("a b c " * 10)
    text = open_splits(DataConfig(source="text", files=(str(tmp_path / "a.txt"),), length=20, eval_fraction=0))
    with pytest.raises(ValueError, match=r"at most 3, lower data\.length, or give more data"):
        check_enough(text.train, 8)
