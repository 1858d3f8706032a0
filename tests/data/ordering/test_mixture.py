"""Mixtures: exact shares, epochs of each part's own, one order on every mesh, nothing copied."""

import numpy as np
import pytest
from spmdkit.data import BadDataError, DataConfig, from_arrays, from_batches, mix, open_splits, train_batches
from spmdkit.data.config import MixturePart, part_config
from spmdkit.data.ordering.mixture import _samples_without_repeats
from spmdkit.data.ordering.order import source_order
from spmdkit.data.shares import locate
from spmdkit.data.source import take

SIZES = (10, 23, 4)


def part(number, size, **more):
    """Examples that say which part and row they are."""
    arrays = {"inputs": np.full((size, 1), number, np.float32), "targets": np.arange(size, dtype=np.int32), **more}
    return from_arrays(arrays, arrays)


def test_a_part_may_replace_a_value_by_zero():
    parts = (MixturePart(source="stdlib", weight=1, eval_fraction=0.0), MixturePart(source="stdlib", weight=1))
    config = DataConfig(source="mixture", eval_fraction=0.1, mixture=parts)
    assert [part_config(config, number).eval_fraction for number in (0, 1)] == [0.0, 0.1]


@pytest.fixture
def mixed():
    return mix([(part(index, size), weight) for index, (size, weight) in enumerate(zip(SIZES, (5, 3, 2), strict=True))])


def order(mixture, samples, seed=3):
    return source_order(np.asarray(samples), source=mixture.train, seed=seed)


def origin_of(mixture, samples, **options):
    """(part, row) of each sample."""
    rows = take(mixture.train, order(mixture, samples, **options))
    return list(zip(rows["inputs"][:, 0].astype(int).tolist(), rows["targets"].tolist(), strict=True))


def test_shares_are_exact_in_batches_too(mixed, sharding):
    batches = train_batches(mixed.train, sharding, global_batch=8, seed=0, start_step=0, num_steps=50)
    given = np.concatenate([np.asarray(batch["inputs"])[:, 0] for batch in batches])
    counts = np.cumsum(given[:, None] == np.arange(3), axis=0)
    ideal = np.outer(np.arange(1, 401), [0.5, 0.3, 0.2])
    assert np.abs(counts - ideal).max() < 1


def test_each_part_has_epochs_of_its_own(mixed):
    seen = origin_of(mixed, np.arange(2300))
    for number, size in enumerate(SIZES):
        rows = [row for which, row in seen if which == number]
        epochs = [rows[start : start + size] for start in range(0, len(rows) - size + 1, size)]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > 1  # another order in each


def test_parts_of_one_size_have_orders_of_their_own():
    mixed = mix([(part(0, 50), 1), (part(1, 50), 1)])
    seen = origin_of(mixed, np.arange(100))
    assert [row for which, row in seen if which == 0] != [row for which, row in seen if which == 1]
    assert seen != origin_of(mixed, np.arange(100), seed=4)


def test_a_mixture_in_a_mixture_keeps_its_rows_beside_a_stream():
    """The stream comes first, so that the places of all other rows are behind it."""
    stream = from_batches(lambda epoch: [take(part(0, 8).train, np.arange(8))])
    inner = mix([(stream, 1), (part(1, 6), 1)])
    outer = mix([(inner, 2), (part(2, 5), 1)])
    seen = origin_of(outer, np.arange(36))
    for number, size in enumerate((8, 6, 5)):
        rows = [row for which, row in seen if which == number]
        assert len(rows) == 12
        assert sorted(rows[:size]) == list(range(size))


def test_without_shuffling_each_part_keeps_its_order(mixed):
    examples = source_order(np.arange(20), source=mixed.train, seed=0, shuffle=False)
    rows = take(mixed.train, examples)
    assert rows["targets"][rows["inputs"][:, 0] == 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_evaluation_has_the_shares_without_repeating(mixed):
    """Weights 5 : 3 : 2 of 10, 23 and 4 rows: the first and the third have given all of theirs after 20."""
    evaluation = mixed.evaluation
    rows = take(evaluation, np.arange(len(evaluation)))
    seen = list(zip(rows["inputs"][:, 0], rows["targets"], strict=True))
    assert len(set(seen)) == len(seen) == 20
    assert np.bincount(rows["inputs"][:, 0].astype(int)).tolist() == [10, 6, 4]
    assert evaluation[19]["targets"] == rows["targets"][19]
    with pytest.raises(IndexError):
        evaluation[20]


def test_parts_without_evaluation_take_no_part_in_it():
    without = part(1, 5)._replace(evaluation=None)
    mixed = mix([(part(0, 6), 0.9), (without, 0.1)])
    assert len(mixed.evaluation) == 6
    assert mix([(without, 1)]).evaluation is None


def test_examples_are_found_by_index(mixed):
    assert len(mixed.train) == sum(SIZES)
    assert (mixed.train[12]["inputs"][0], mixed.train[12]["targets"]) == (1, 2)
    assert mixed.train.origin(12) == "the parts of a mixture[1], example 2"
    with pytest.raises(IndexError):
        mixed.train[37]


def test_the_fingerprint_changes_with_shares_and_parts():
    def mark(*parts):
        return mix(parts).fingerprint

    a, b = part(0, 5), part(1, 6)
    assert mark((a, 1), (b, 2)) == mark((a, 0.5), (b, 1))
    assert len({mark((a, 1), (b, 2)), mark((a, 2), (b, 1)), mark((b, 2), (a, 1)), mark((a, 1))}) == 4
    assert mark((a._replace(fingerprint=""), 1), (b, 2)) == ""


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "the parts of a mixture: the list is empty"),
        ([(part(0, 5), 1), (part(1, 5, more=np.zeros(5)), 1)], r"\[0\] has examples of .*, but .*\[1\] has .*'more'"),
        ([(part(0, 5)._replace(vocabulary=256), 1), (part(1, 5), 1)], "has 256 token ids, .* has no token ids"),
        ([(part(0, 5), -1)], "weights must be positive and finite, got -1"),
    ],
)
def test_rejects_parts_that_do_not_match(parts, message):
    with pytest.raises(ValueError, match=message):
        mix(parts)


@pytest.fixture
def files(tmp_path, corpus):
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(256, size=5000, dtype=np.uint16))
    texts = MixturePart(source="text", files=(f"{corpus}/**/*.txt",), weight=0.7)
    return [texts, MixturePart(source="tokens", files=(str(tmp_path / "ids.npy"),), weight=0.3, eval_fraction=0.5)]


def mixed_config(parts, **options):
    return DataConfig(**({"source": "mixture", "mixture": tuple(parts), "length": 20} | options))


def test_from_a_config(files):
    splits = open_splits(mixed_config(files, vocabulary=256))
    alone = [open_splits(part_config(mixed_config(files, vocabulary=256), number)) for number in range(2)]
    assert splits.description.startswith("mixture of 70 % text: text files (200 files, 60,000 bytes); ")
    assert " + 30 % tokens: token files (1 file, 5,000 tokens); " in splits.description
    assert len(splits.train) == sum(len(each.train) for each in alone)
    last = len(splits.train) - 1
    assert np.array_equal(splits.train[last]["inputs"], alone[1].train[len(alone[1].train) - 1]["inputs"])
    assert splits.train.origin(last).startswith("data.mixture[1], ids.npy, from token ")


def test_bad_data_of_a_part_stays_bad_data(tmp_path):
    np.savez(tmp_path / "nan.npz", inputs=np.array([np.nan, 1.0]), targets=np.zeros(2))
    part = MixturePart(source="arrays", files=(str(tmp_path / "nan.npz"),), weight=1)
    with pytest.raises(BadDataError, match=r"data\.mixture\[0\]: inputs of example .* is nan"):
        open_splits(mixed_config([part], eval_fraction=0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixture": ()}, "data.source=mixture: data.mixture is empty"),
        ({"source": "stdlib"}, r"data\.mixture is set, but data\.source=stdlib does not have parts"),
        ({"files": ("a",)}, "each part has its own files"),
        ({"mixture": (MixturePart(weight=1, source="txt"),)}, r"data\.mixture\[0\]: data\.source='txt' .*text\?"),
        ({"mixture": (MixturePart(weight=1, source="mixture"),)}, "A part cannot be a mixture"),
        ({"mixture": (MixturePart(weight=1, source="text", column="x"),)}, "mixture.0.: data.source=text: data.files"),
    ],
)
def test_rejects_invalid_mixtures(options, message):
    given = {"mixture": (MixturePart(weight=1, source="stdlib"),)} | options
    with pytest.raises(ValueError, match=message):
        mixed_config(**({"parts": given.pop("mixture")} | given))


def test_parts_share_the_other_keys():
    config = mixed_config([MixturePart(weight=1, source="tokens", files=("a",), separator=3)], eval_fraction=0.2)
    assert part_config(config, 0) == DataConfig(
        source="tokens", files=("a",), separator=3, length=20, eval_fraction=0.2
    )


@pytest.mark.parametrize("weights", [(1, 1), (2, 3), (1, 7), (5, 1, 3)], ids=str)
def test_a_mixture_is_as_long_as_no_example_comes_twice(weights):
    """Counted one by one, for parts of many lengths."""
    for seed in range(30):
        lengths = np.random.default_rng(seed).integers(1, 12, len(weights)).tolist()
        parts, numbers = locate(np.arange(400), weights)
        naive = next(n for n in range(400) if numbers[n] >= lengths[parts[n]])
        assert _samples_without_repeats(lengths, weights) == naive, lengths
