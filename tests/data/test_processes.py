"""Two real processes: each reads its own rows alone, and together they make the batches of one process."""

import os
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from spmdkit.data import eval_batches, from_arrays, from_examples, train_batches

WORKER = """
import sys
from spmdkit import initialize
from spmdkit.mesh import simulate
simulate(2)
initialize()
import jax, numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from spmdkit.data import eval_batches, from_arrays, from_examples, train_batches

class Recording:
    def __init__(self, source):
        self.source, self.read = source, set()
    def __len__(self):
        return len(self.source)
    def take(self, indices):
        self.read.update(indices.tolist())
        return self.source.take(indices)
    def __getitem__(self, index):
        raise AssertionError("examples are read together")

def stream(epoch):
    for row in np.random.default_rng(epoch).permutation(20):
        yield {"inputs": np.full(3, row), "targets": row}

inputs = np.arange(90, dtype=np.int32).reshape(30, 3)
source = Recording(from_arrays({"inputs": inputs, "targets": inputs}).train)
devices = np.array(jax.devices())
seen = {}
for name, mesh in {"rows": devices, "crossed": devices[[2, 0, 3, 1]], "tensor": devices.reshape(2, 2)}.items():
    names = ("data",) if mesh.ndim == 1 else ("tensor", "data")
    mesh = Mesh(mesh, names, axis_types=(AxisType.Auto,) * mesh.ndim)
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    batches = {"train": train_batches(source, sharding, global_batch=8, seed=1, start_step=1, num_steps=2),
               "eval": eval_batches(source, sharding, global_batch=8),
               "stream": train_batches(from_examples(stream).train, sharding, global_batch=8, seed=1, start_step=1,
                                       num_steps=3)}
    for kind, iterator in batches.items():
        source.read.clear()
        for number, batch in enumerate(iterator):
            for key, array in batch.items():
                for shard in array.addressable_shards:
                    seen[f"{name}/{kind}/{number}/{key}/{shard.index[0].start}"] = np.asarray(shard.data)
        seen[f"{name}/{kind}/read"] = np.array(sorted(source.read))
np.savez(sys.argv[1], **seen)
"""


def run_two(tmp_path):
    """Starts two processes and returns what each of them saw."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "XLA_"))}
    common = {**clean, "SPMDKIT_JOB_ADDRESSES": address, "SPMDKIT_NUM_PROCESSES": "2"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(tmp_path / f"{number}.npz")],
            env={**common, "SPMDKIT_PROCESS_ID": str(number)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        errors = [worker.communicate(timeout=120)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    assert [worker.returncode for worker in workers] == [0, 0], errors
    return [dict(np.load(tmp_path / f"{number}.npz")) for number in range(2)]


def stream(epoch):
    """As in WORKER: epochs of 20 rows; the first batch of 8 is skipped, the third goes over into the next epoch."""
    for row in np.random.default_rng(epoch).permutation(20):
        yield {"inputs": np.full(3, row), "targets": row}


def one_process(mesh):
    """The batches of a single process, as `kind -> [batch]`."""
    inputs = np.arange(90, dtype=np.int32).reshape(30, 3)
    source = from_arrays({"inputs": inputs, "targets": inputs}).train
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    train = train_batches(source, sharding, global_batch=8, seed=1, start_step=1, num_steps=2)
    streamed = from_examples(stream).train
    rows = train_batches(streamed, sharding, global_batch=8, seed=1, start_step=1, num_steps=3)
    return {"train": [*train], "eval": [*eval_batches(source, sharding, global_batch=8)], "stream": [*rows]}


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_read_their_rows_and_make_the_batches_of_one(tmp_path, mesh):
    seen = run_two(tmp_path)
    expected = {kind: jax.device_get(batches) for kind, batches in one_process(mesh).items()}
    for process in seen:
        for place, rows in process.items():
            name, kind, *rest = place.split("/")
            if rest == ["read"]:
                continue
            number, key, start = int(rest[0]), rest[1], int(rest[2]) if rest[2] != "None" else 0
            assert np.array_equal(rows, expected[kind][number][key][start : start + len(rows)]), (name, place)
    starts = [
        {int(place.split("/")[-1]) for place in process if place.startswith("crossed/train/0/inputs")}
        for process in seen
    ]
    assert starts == [{2, 6}, {0, 4}]
    assert [len(process["rows/train/read"]) for process in seen] == [8, 8]  # 2 batches of 4 of 8 rows
    assert not set(seen[0]["rows/train/read"]) & set(seen[1]["rows/train/read"])
    assert set(seen[0]["rows/eval/read"]) | set(seen[1]["rows/eval/read"]) == set(range(30))
    assert [len(process["tensor/train/read"]) for process in seen] == [16, 16]  # tensor parts of the same rows
