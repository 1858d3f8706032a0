"""Streams: rows in the order of one process on any mesh, a resume by skipping, and what is read only once says so."""

import os
import signal
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import jax
import numpy as np
import pytest
from spmdkit.data import eval_batches, from_arrays, from_batches, from_examples, mix, train_batches
from spmdkit.launch.cli import main
from spmdkit.mesh.errors import UserError
from spmdkit.mesh.known_causes import known_cause, lost_worker
from support.runs import metrics, write_config
from support.training import LOADER_ROWS, Loader, epoch


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
    assert len(set(readers[1:])) == 1  # the first item is looked at when the data is opened


def test_a_loader_is_begun_anew_each_epoch(sharding):
    loader, same = Loader(seed=5), Loader(seed=5)
    assert rows_of(from_batches(loader).train, sharding, steps=9).tolist() == plain(lambda epoch: same, 72)
    assert loader.times == 3


def test_a_resume_skips_and_says_so_once(sharding, capsys):
    whole = rows_of(from_batches(epoch).train, sharding)
    assert capsys.readouterr().err == ""
    resumed = rows_of(from_batches(epoch).train, sharding, start=4, steps=2)
    assert resumed.tolist() == whole[32:].tolist()
    message = (
        "data: a stream does not support seeking: every process reads its rows before step 5 again and drops them.\n"
    )
    assert capsys.readouterr().err == message


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


def test_rejects_objects_without_iteration():
    with pytest.raises(ValueError, match="a int cannot be iterated"):
        from_batches(3)
    with pytest.raises(ValueError, match="for evaluation gave no rows"):
        from_batches(epoch, [])
    with pytest.raises(ValueError, match="training rows have inputs, targets, weights, but evaluation rows a, weights"):
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
    assert "every process reads its rows before step 5 again" in capsys.readouterr().err


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
def test_a_run_on_a_stream_goes_on_where_it_was(tmp_path, cli, monkeypatch):
    (tmp_path / "streamed.py").write_text(RUN)
    monkeypatch.delitem(sys.modules, "streamed", raising=False)
    options = {"data": {"source": "streamed:stream"}, "optimizer": {"learning_rate": 0.01}}
    config = str(write_config(tmp_path, **options))
    assert main(["train", config, f"run.dir={tmp_path}/whole"]) == 0
    assert main(["train", config, "train.steps=5"]) == 0
    assert "its rows before step 6 again" in cli(0, "train", config).err
    whole, resumed = (losses(metrics(tmp_path / name)) for name in ("whole", "run"))
    assert resumed == whole


def test_single_pass_stream_explains_its_end(monkeypatch):
    monkeypatch.setattr("spmdkit.data.sources.iterables.HEAD_BYTES", 1)  # only the first item is kept

    def batches():
        yield from Loader(20, seed=0)

    with pytest.raises(ValueError, match=r"a generator ended after 20 rows; the run needs more: .* train\.steps"):
        from_batches(batches()).train.take(np.arange(16, 24))
    stream = from_batches(batches()).train
    assert stream.take(np.array([19, 0]))["targets"].shape == (2,)
    with pytest.raises(ValueError, match=r"is at row 20 and cannot go back to row 6: it can be read only once"):
        stream.take(np.array([6]))


def test_going_back_begins_again_where_that_is_possible(monkeypatch):
    monkeypatch.setattr("spmdkit.data.sources.iterables.HEAD_BYTES", 1)
    stream = from_batches(lambda number: Loader(20, seed=number)).train
    far = stream.take(np.array([19, 6]))["targets"]
    assert stream.take(np.array([6, 19]))["targets"].tolist() == far[::-1].tolist()


def test_rows_keep_their_names_and_weights():
    items = [{"image": np.ones((2, 3)), "targets": {"a": [1, 2]}, "weights": np.array([1, 0], np.float32)}]
    train = from_batches(items).train
    assert set(train[1]) == {"image", "targets/a", "weights"}
    assert (train[1]["weights"], train[2]["weights"]) == (0, 1)  # row 2 is the first of the second epoch
    assert train.origin(1) == "row 1 of the stream of batches of a list"


@pytest.mark.parametrize(
    ("items", "read", "message"),
    [
        ([], 0, "the stream of batches of a list gave no rows in its epoch 0"),
        (
            [(np.ones((2, 2)), 1)],
            0,
            r"these have {'inputs': 2, 'targets': 'no dim'.*Give single examples to from_examples",
        ),
        ([(np.ones(2), np.ones(2)), (np.ones((2, 2)), np.ones(2))], 2, "are .* at first and .* from row 2 on"),
        ([(np.ones(2), ["a", "b"])], 0, "targets contains <U1"),
    ],
)
def test_rejects_invalid_items(items, read, message):
    with pytest.raises(ValueError, match=message):
        from_batches(items).train[read]


def test_stream_error_names_its_line():
    def broken(number):
        yield from Loader(seed=number)
        raise KeyError("a shard is missing")

    stream = from_batches(broken).train
    with pytest.raises(
        ValueError, match=r"reading the stream of batches of broken fails in .*test_iterables\.py, line \d+"
    ):
        stream.take(np.array([LOADER_ROWS]))


def test_an_error_of_a_mapped_function_is_no_end_of_an_epoch():
    shards = iter([1.0, 2.0])

    def load(number):
        return (np.full((2, 2), next(shards)), np.zeros(2))

    stream = from_batches(lambda epoch: map(load, range(5))).train
    assert stream.take(np.arange(4))["inputs"][:, 0].tolist() == [1, 1, 2, 2]
    with pytest.raises(
        UserError, match=r"fails in .*test_iterables\.py, line \d+ \(return .*next\(shards\).*StopIteration"
    ):
        stream.take(np.array([4]))
    with pytest.raises(UserError, match="has failed at row 4 before"):
        stream.take(np.array([4]))


def test_an_item_of_None_is_no_end_of_an_epoch():
    stream = from_batches([(np.ones((2, 2)), np.ones(2)), None]).train
    with pytest.raises(UserError, match="got a NoneType"):
        stream.take(np.array([2]))


def example(number):
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"inputs": np.full(2, number), "targets": number}


def pooled(epoch):
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield from pool.map(example, range(8))


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_killed_worker_of_a_pool():
    stream = from_examples(pooled).train
    with pytest.raises(RuntimeError, match=r"terminated") as raised:
        stream.take(np.arange(8))
    assert known_cause(raised.value)[0] == 75


@pytest.mark.parametrize(
    "said",
    [
        "DataLoader worker (pid(s) 4711) exited unexpectedly",
        "DataLoader worker (pid 4711) is killed by signal: Killed. ",
        "DataLoader timed out after 5 seconds",
    ],
)
def test_what_a_DataLoader_says_in_the_main_thread(said):
    code, message = known_cause(RuntimeError(said))
    assert code == 75
    assert said.strip().rstrip(".") in message
    assert "/dev/shm" in message


def test_other_errors_tell_of_no_worker():
    assert lost_worker(RuntimeError("DataLoader is confused")) == ""
    assert lost_worker(ValueError("DataLoader worker (pid 1)")) == ""
