"""Buckets: one length a batch, as many compilations as buckets, one order on every mesh, padding counts nothing."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from spmdkit.data import bucket_by_length, eval_batches, from_dataset, train_batches
from spmdkit.data.batches import abstract_batch, further_batches
from spmdkit.data.ordering import buckets as buckets_file
from spmdkit.data.ordering.buckets import BucketedSource

import spmdkit

LENGTHS = (4, 8, 16)
PADDED = ("inputs", "weights")


def examples(number=60, seed=0):
    """Sequences of the numbers of their example, of 1 to 16 rows."""
    sizes = np.random.default_rng(seed).integers(1, 17, number)
    return [(np.full(size, row + 1, np.int32), np.full(size, row, np.int32)) for row, size in enumerate(sizes)]


@pytest.fixture
def splits():
    return bucket_by_length(from_dataset(examples(), examples(10, seed=1)), lengths=LENGTHS)


def batches_of(source, sharding, start=0, steps=40, seed=0):
    found = train_batches(source, sharding, global_batch=8, seed=seed, start_step=start, num_steps=steps)
    return [jax.device_get(batch) for batch in found]


def test_a_batch_has_one_of_the_lengths(splits, sharding):
    for batch in batches_of(splits.train, sharding):
        rows = batch["weights"].sum(1).astype(int)
        length = batch["inputs"].shape[1]
        assert length in LENGTHS
        assert all(length == next(each for each in LENGTHS if each >= size) for size in rows)
        assert np.array_equal(batch["weights"] > 0, batch["inputs"] > 0)  # padding is 0, and counts nothing


def test_every_example_is_seen_equally_often(splits, sharding):
    seen = np.concatenate([batch["targets"][:, 0] for batch in batches_of(splits.train, sharding, steps=150)])
    counts = np.bincount(seen, minlength=60)
    assert counts.sum() == 1200
    assert counts.min() >= 19
    assert counts.max() <= 22


def test_the_order_is_that_of_any_mesh_and_a_resume_a_seek(splits, mesh):
    whole = batches_of(splits.train, NamedSharding(mesh, PartitionSpec("data")), steps=9)
    for axes, start in ((("data", "fsdp"), 0), ("fsdp", 4)):
        part = batches_of(splits.train, NamedSharding(mesh, PartitionSpec(axes)), start=start, steps=9 - start)
        for before, after in zip(whole[start:], part, strict=True):
            assert all(np.array_equal(before[name], after[name]) for name in before)
    assert [
        b["inputs"].shape for b in batches_of(splits.train, NamedSharding(mesh, PartitionSpec()), seed=7, steps=9)
    ] == [batch["inputs"].shape for batch in whole]  # which bucket a step is of does not depend on the seed


def test_held_out_rows_have_the_longest(splits, sharding):
    seen = [jax.device_get(batch) for batch in eval_batches(splits.evaluation, sharding, global_batch=8)]
    assert {batch["inputs"].shape for batch in seen} == {(8, 16)}
    assert sum(batch["weights"].sum() for batch in seen) == sum(len(inputs) for inputs, _ in examples(10, seed=1))


@pytest.mark.parametrize("announced", [True, False])
def test_the_step_is_compiled_once_a_bucket_and_padding_changes_nothing(splits, announced):
    def loss(params, batch, key):
        return (batch["weights"] * params["table"][batch["inputs"]] ** 2).sum(), batch["weights"].sum()

    model = spmdkit.Model(init=lambda key: {"table": jnp.linspace(0.1, 1.0, 64)}, loss=loss)
    layouts = spmdkit.lay_out(model, {"data": 8})
    step = spmdkit.build_step(model, optax.sgd(0.1), layouts)
    state, table = step.init(seed=0), np.linspace(0.1, 1.0, 64, dtype=np.float32)
    found = train_batches(splits.train, layouts.batch_sharding(), global_batch=8, seed=0, start_step=0, num_steps=12)
    shapes = set()
    if announced:
        given = splits.train, 8, layouts.batch_sharding()
        assert len([step.compile(shapes) for shapes in (abstract_batch(*given), *further_batches(*given))]) == 3
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for batch in found:
            shapes.add(batch["inputs"].shape)
            rows = np.asarray(batch["inputs"])
            ids = rows[rows > 0]
            state, metrics = step(state, batch)
            assert float(metrics.loss) == pytest.approx(float((table[ids] ** 2).mean()), rel=1e-5)
            np.subtract.at(table, ids, 0.2 * table[ids] / len(ids))
    assert len(shapes) == 3
    again = [each for each in told if "compiled again" in str(each.message)]
    assert len(again) == (0 if announced else 2)  # once for every other bucket


def test_computes_lengths_with_as_many_examples_each():
    splits = bucket_by_length(from_dataset([(np.ones(size, int),) * 2 for size in range(1, 101)]), buckets=4)
    assert splits.train.lengths.tolist() == [32, 56, 80, 104]
    assert splits.description.startswith("list: 100 examples, in buckets of 32, 56, 80, 104 (")
    few = bucket_by_length(from_dataset(examples()), buckets=4)
    assert few.train.lengths.tolist() == [8, 16]
    assert few.fingerprint != bucket_by_length(from_dataset(examples()), lengths=[16]).fingerprint


def test_held_out_rows_may_be_longer_than_all_that_train():
    """The bucket of 16 is theirs alone: none trains on it."""
    short = [(np.ones(3, np.int32), np.ones(3, np.int32))]
    splits = bucket_by_length(from_dataset(short * 4, examples(10, seed=1)), lengths=LENGTHS)
    assert splits.train.lengths.tolist() == [4]
    assert splits.evaluation.take(np.arange(10))["inputs"].shape == (10, 16)


def test_what_is_padded_is_in_the_fingerprint():
    whole, less = (bucket_by_length(from_dataset(examples()), lengths=[16], padded=names) for names in (None, PADDED))
    assert whole.fingerprint != less.fingerprint


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (examples(), {"lengths": [4, 8]}, r"lengths=\[4, 8\] must be at least 1 and reach the 16 rows of the longest"),
        (examples(), {"lengths": [0, 16]}, "must be at least 1"),
        (examples(), {"lengths": []}, "must be at least 1"),
        ([(np.ones(3), 1)], {}, r"weights of the shape \(\): padding gets weights of 0"),
        ([(np.ones(0), np.ones(0))], {}, "example 0 has inputs without rows"),
    ],
)
def test_rejects_invalid_bucket_examples(given, options, message):
    with pytest.raises(ValueError, match=message):
        bucket_by_length(from_dataset(given), **options)


def test_an_array_of_another_length_is_named():
    splits = bucket_by_length(
        from_dataset([(np.ones(3, int), np.ones(3, int)), (np.ones(2, int), np.ones(3, int))]), lengths=[4]
    )
    with pytest.raises(ValueError, match=r"example 1: targets has the shape \(3,\), but its length is 2"):
        splits.train[1]


def test_examples_of_several_buckets_are_padded_to_the_longest_of_theirs(splits):
    """In a batch they are of one; whoever takes others gets all of their rows."""
    middle, least = (int(np.flatnonzero(splits.train.bucket_of == bucket)[0]) for bucket in (1, 0))
    found = splits.train.in_batches(8).take(np.array([least, middle]))
    assert found["inputs"].shape == (2, LENGTHS[1])
    assert (found["weights"].sum(1) == [len(examples()[index][0]) for index in (least, middle)]).all()


def bucketed(sizes):
    """Examples of so many rows, in batches of one, each length a bucket."""
    return BucketedSource([{}] * len(sizes), np.array(sizes), sorted(set(sizes)), ("weights",)).in_batches(1)


def test_one_long_example_among_very_many_has_its_turn(monkeypatch):
    monkeypatch.setattr(buckets_file, "MAX_PERIOD", 10)
    order = bucketed([1] * 40 + [2]).order(np.arange(10), seed=0, shuffle=False)
    assert 40 in order.tolist()


def test_buckets_of_the_same_size_have_orders_of_their_own():
    order = bucketed([1, 2] * 20).order(np.arange(40), seed=3, shuffle=True)
    even, odd = (order[order % 2 == rest] // 2 for rest in (0, 1))
    assert sorted(even.tolist()) == sorted(odd.tolist()) == list(range(20))
    assert even.tolist() != odd.tolist()
