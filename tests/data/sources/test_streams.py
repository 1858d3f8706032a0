"""Streams: rows in the order of one process on any mesh, a resume by skipping, and what is read only once says so."""

import sys
import threading

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from loaders import Loader, epoch
from runs import metrics, write_config
from spmdkit.data import eval_batches, from_arrays, from_batches, from_examples, mix, train_batches
from spmdkit.launch.cli import main


def rows_of(train, sharding, *, start=0, steps=6, batch=8, **options):
    found = train_batches(train, sharding, global_batch=batch, seed=0, start_step=start, num_steps=steps, **options)
    return np.concatenate([np.asarray(each["targets"]) for each in found])


def plain(make, number):
    """The first rows, as a loop over the epochs reads them."""
    found = []
    for each in range(100):
        found += [int(row) for _, targets in make(each) for row in targets]
        if len(found) >= number:
            return found[:number]
    raise AssertionError("too short")


@pytest.mark.parametrize("threads", [0, 4])
def test_samples_are_the_rows_one_after_the_other(sharding, threads):
    assert rows_of(from_batches(epoch).train, sharding, threads=threads).tolist() == plain(epoch, 48)


def test_only_one_thread_reads_it(sharding):
    """Several would read steps out of turn, and each turn back begins the stream again."""
    readers = []

    def noting(number):
        for item in Loader(seed=number):
            readers.append(threading.current_thread().name)
            yield item

    rows_of(from_batches(noting).train, sharding, threads=4)
    assert set(readers[1:]) == {"spmdkit-prefetch"}  # the first item is looked at when the data is opened


def test_a_loader_is_begun_anew_each_epoch(sharding):
    loader, same = Loader(seed=5), Loader(seed=5)
    assert rows_of(from_batches(loader).train, sharding, steps=9).tolist() == plain(lambda epoch: same, 72)
    assert loader.times == 3


def test_every_mesh_has_the_same_rows(mesh):
    found = [
        rows_of(from_batches(epoch).train, NamedSharding(mesh, PartitionSpec(axes))).tolist()
        for axes in ("data", ("data", "fsdp"), None)
    ]
    assert found[0] == found[1] == found[2]


def test_a_resume_skips_and_says_so_once(sharding, capsys):
    whole = rows_of(from_batches(epoch).train, sharding)
    assert capsys.readouterr().err == ""
    resumed = rows_of(from_batches(epoch).train, sharding, start=4, steps=2)
    assert resumed.tolist() == whole[32:].tolist()
    said = "data: a stream cannot be sought: the 32 rows before step 5 are read again and dropped, by every process.\n"
    assert capsys.readouterr().err == said


def test_single_examples_and_generators(sharding):
    def numbers():
        for number in range(100):
            yield {"inputs": np.full(2, number), "targets": number}

    splits = from_examples(numbers())
    assert splits.description == "stream of examples of a generator"
    assert rows_of(splits.train, sharding).tolist() == list(range(48))


def test_held_out_rows_are_read_into_memory(sharding):
    splits = from_batches(epoch, Loader(10, seed=1))
    assert splits.description == "stream of batches of epoch, 10 evaluation examples"
    seen = [jax.device_get(batch) for batch in eval_batches(splits.evaluation, sharding, global_batch=8)]
    kept = np.concatenate([batch["targets"][batch["weights"] > 0] for batch in seen])
    assert kept.tolist() == plain(lambda number: Loader(10, seed=1), 10)


def test_the_fingerprint_is_that_of_the_first_batch():
    assert from_batches(Loader(seed=3)).fingerprint == from_batches(Loader(seed=3)).fingerprint
    assert from_batches(Loader()).fingerprint != from_batches(Loader()).fingerprint  # shuffled without a seed


def test_what_is_no_stream():
    with pytest.raises(ValueError, match="a int cannot be iterated"):
        from_batches(3)
    with pytest.raises(ValueError, match="for evaluation gave no rows"):
        from_batches(epoch, [])
    with pytest.raises(ValueError, match="training rows have inputs, targets, weights, evaluation rows a, weights"):
        from_batches(epoch, [{"a": np.ones(2)}])


def test_streams_in_a_mixture(sharding, capsys):
    """Of any samples each part has its share; a stream gives its rows in their order, shuffled or not, on any mesh."""
    fixed = from_arrays({"inputs": np.zeros((7, 2), np.float32), "targets": np.arange(100, 107)})
    other = from_batches(lambda number: Loader(11, seed=number + 50))
    splits = mix([(from_batches(epoch), 2), (fixed, 1), (other, 1)])
    found = rows_of(splits.train, sharding, threads=4)
    of_fixed = [row for row in found.tolist() if row >= 100]
    assert len(of_fixed) == 12
    assert sorted(of_fixed[:7]) == [*range(100, 107)]
    parts = splits.train.order(np.arange(48), seed=0, shuffle=True)
    first = found[parts < 1 << 48].tolist()
    last = found[parts >= (1 << 48) + 7].tolist()
    assert first == plain(epoch, 24)
    assert last == plain(lambda number: Loader(11, seed=number + 50), 12)
    assert rows_of(splits.train, sharding, start=4, steps=2).tolist() == found[32:].tolist()
    assert "the 24 rows before step 5 are read again" in capsys.readouterr().err


RUN = """
import sys, numpy as np
from spmdkit.data import from_batches

def epoch(number):
    order = np.random.default_rng(number).permutation(64)
    for start in range(0, 64, 10):
        chosen = order[start : start + 10]
        yield {"inputs": np.eye(64, dtype=np.float32)[chosen], "targets": chosen % 10}

def stream(config):
    return from_batches(epoch, epoch(0))
"""


def losses(records):
    return [(each["step"], each["loss"], each["grad_norm"]) for each in records]


@pytest.mark.slow
def test_a_run_on_a_stream_goes_on_where_it_was(tmp_path, capsys, monkeypatch):
    (tmp_path / "streamed.py").write_text(RUN)
    monkeypatch.delitem(sys.modules, "streamed", raising=False)
    options = {"data": {"source": "streamed:stream"}, "optimizer": {"learning_rate": 0.01}}
    config = str(write_config(tmp_path, **options))
    assert main(["train", config, f"run.dir={tmp_path}/whole"]) == 0
    assert main(["train", config, "train.steps=5"]) == 0
    assert main(["train", config]) == 0
    assert "the 80 rows before step 6 are read again" in capsys.readouterr().err
    whole, resumed = (losses(metrics(tmp_path / name)) for name in ("whole", "run"))
    assert resumed == whole
