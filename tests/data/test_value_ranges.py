"""Labels that are no class, ids that are no token, numbers that are none: told with their row before they train."""

import jax.numpy as jnp
import numpy as np
import pytest
from spmdkit.data import (
    BadDataError,
    DataConfig,
    Splits,
    eval_batches,
    from_arrays,
    from_batches,
    from_dataset,
    open_splits,
    train_batches,
)
from spmdkit.data.sources.texts import Document
from spmdkit.data.value_ranges import Limit, Limits, check_rows, check_splits
from spmdkit.data.windows import WindowSource
from spmdkit.mesh.errors import UserError

CLASSES = Limits(targets=Limit("model.classes", 10))
TOKENS = Limits(Limit("model.vocabulary", 100), Limit("model.vocabulary", 100))
NONE = Limits()


def rows(number=12, **more):
    arrays = {"inputs": np.zeros((number, 3), np.float32), "targets": np.arange(number) % 10}
    return {**arrays, "weights": np.ones(number, np.float32), **more}


def tokens(**more):
    ids = np.arange(60, dtype=np.int32).reshape(12, 5)
    return {"inputs": ids, "targets": ids + 1, "weights": np.ones((12, 5), np.float32), **more}


def with_value(array, place, value):
    array = array.copy()
    array[place] = value
    return array


def checked(arrays, limits):
    check_rows(arrays, limits, lambda row: f"example {row}")


@pytest.mark.parametrize(
    ("arrays", "limits"),
    [
        (rows(), CLASSES),
        (rows(), NONE),
        (tokens(), TOKENS),
        (tokens(inputs=np.full((12, 5), 99)), TOKENS),
        (tokens(inputs=np.full((12, 5), 1000)), NONE),
        (rows(targets=np.full(12, -5)), NONE),
        (rows(targets=np.full(12, 0.5)), NONE),
        (rows(weights=np.zeros(12)), CLASSES),
        (rows(weights=np.ones(12, bool)), CLASSES),
        (rows(mask=np.full(12, np.nan)), CLASSES),  # the user's own array
        (rows(inputs=np.zeros((12, 3), bool)), CLASSES),
        (rows(inputs=np.zeros((12, 0))), CLASSES),
        # what does not count may be anything
        (rows(targets=with_value(np.arange(12) % 10, 7, -100), weights=with_value(np.ones(12), 7, 0)), CLASSES),
        (tokens(targets=with_value(np.ones((12, 5), int), (7, 2), 100), weights=with_value(np.ones(12), 7, 0)), TOKENS),
        (rows(targets=with_value(np.ones(12), 7, np.nan), weights=with_value(np.ones(12), 7, 0)), NONE),
    ],
)
def test_what_is_allowed(arrays, limits):
    checked(arrays, limits)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("arrays", "limits", "message"),
    [
        (rows(targets=np.arange(12)), CLASSES, "targets of example 10 is 10; model.classes=10 allows 0 .. 9."),
        (rows(targets=with_value(np.ones(12, int), 3, -1)), CLASSES, "targets of example 3 is -1; model.classes=10"),
        (rows(targets=np.full(12, -1), weights=np.full(12, 0.5)), CLASSES, "targets of example 0 is -1; model.classes"),
        (rows(targets=np.full(12, 255, np.uint8)), CLASSES, "targets of example 0 is 255; model.classes=10"),
        (rows(targets=np.full(12, 2**63, np.uint64)), CLASSES, "is 9223372036854775808; model.classes=10"),
        (
            tokens(inputs=with_value(np.ones((12, 5), int), (7, 2), 100)),
            TOKENS,
            "inputs of example 7 at [2] is 100; model.vocabulary=100 allows 0 .. 99. Raise it, or fix the data.",
        ),
        (tokens(targets=with_value(np.ones((12, 5), int), (7, 2), 100)), TOKENS, "targets of example 7 at [2] is 100;"),
        # an input has to be a token wherever it stands
        (tokens(inputs=np.full((12, 5), -1), weights=np.zeros((12, 5))), TOKENS, "inputs of example 0 at [0] is -1;"),
        (rows(weights=with_value(np.ones(12), 4, -0.5)), NONE, "weights of example 4 is -0.5: a weight must be finite"),
        (rows(weights=with_value(np.ones(12), 4, NAN)), NONE, "weights of example 4 is nan: a weight must be finite"),
        (rows(weights=with_value(np.ones(12), 4, INF)), NONE, "weights of example 4 is inf: a weight must be finite"),
        (rows(weights=with_value(np.ones(12, int), 4, -1)), NONE, "weights of example 4 is -1: a weight must be"),
        (rows(inputs=with_value(np.zeros((12, 3)), (5, 1), NAN)), CLASSES, "inputs of example 5 at [1] is nan: not a"),
        (rows(inputs=with_value(np.zeros((12, 3)), (5, 1), -INF)), NONE, "inputs of example 5 at [1] is -inf: not a"),
        (
            rows(inputs=with_value(np.zeros((12, 3)), (5, 1), 1e39)),
            NONE,
            "at [1] is 1e+39: not a finite number of float32",
        ),
        (rows(targets=with_value(np.zeros(12), 5, NAN)), NONE, "targets of example 5 is nan: not a finite number"),
        (
            rows(ages=with_value(np.zeros(12, np.int64), 5, 2**31)),
            NONE,
            "ages of example 5 is 2147483648, which does not",
        ),
        (
            tokens(inputs=np.full((12, 5), 2**40)),
            NONE,
            "inputs of example 0 at [0] is 1099511627776, which does not fit",
        ),
    ],
)
def test_rejects_invalid_values(arrays, limits, message):
    with pytest.raises(BadDataError) as info:
        checked(arrays, limits)
    assert message in str(info.value)
    assert info.value.exit_code == 3


@pytest.mark.parametrize("dtype", ["float16", "float64", "bfloat16", "float8_e4m3fn"])
def test_floats_of_every_width(dtype):
    array = np.ones((4, 3), jnp.dtype(dtype))
    checked({"inputs": array, "weights": array[:, 0]}, NONE)
    with pytest.raises(BadDataError, match=r"inputs of example 2 at \[1\] is nan: not a finite number of "):
        checked({"inputs": with_value(array, (2, 1), np.nan)}, NONE)


def test_only_targets_mention_padding():
    for name, said in (("targets", True), ("inputs", False)):
        with pytest.raises(BadDataError) as info:
            checked(tokens(**{name: np.full((12, 5), 100)}), TOKENS)
        assert str(info.value).endswith(" If it is padding, give it weight 0.") == said


def test_token_ids_are_checked_against_the_vocabulary_that_is_given():
    ids = np.arange(60).reshape(12, 5)
    from_arrays({"inputs": ids, "targets": ids + 1}, vocabulary=60)  # what targets are the model knows
    with pytest.raises(
        BadDataError, match=r"inputs of example 11 of the evaluation split at \[4\] is 59; vocabulary=59"
    ):
        from_arrays({"inputs": ids[:3], "targets": ids[:3]}, {"inputs": ids, "targets": ids}, vocabulary=59)


def test_labels_that_are_no_whole_numbers():
    splits = from_arrays(rows(targets=np.zeros(12, np.float32)))
    check_splits(splits, NONE)
    with pytest.raises(BadDataError, match=r"targets are float32; model\.classes=10 requires integers, 0 \.\. 9\."):
        check_splits(splits, CLASSES)


def npz_files(folder, **bad):
    for name in "ab":
        np.savez(folder / f"{name}.npz", **{**rows(300), **(bad if name == "b" else {})})
    return DataConfig(source="arrays", files=(f"{folder}/*.npz",), eval_fraction=0.2)


def test_the_file_and_its_row_are_named(tmp_path):
    config = npz_files(tmp_path, inputs=with_value(np.zeros((300, 3), np.float32), (123, 2), np.nan))
    with pytest.raises(BadDataError, match=rf"\(row 123 of {tmp_path}/b\.npz\) at \[2\] is nan: not a finite number"):
        open_splits(config)
    splits = open_splits(npz_files(tmp_path, targets=with_value(np.zeros(300, int), 77, 10)))
    with pytest.raises(BadDataError, match=rf"\(row 77 of {tmp_path}/b\.npz\) is 10; model\.classes=10"):
        check_splits(splits, CLASSES)


def mapped(tmp_path, targets):
    np.save(tmp_path / "targets.npy", targets)
    given = rows(len(targets), targets=np.load(tmp_path / "targets.npy", mmap_mode="r"))
    return from_arrays(given)


def test_memory_maps_are_checked_batch_by_batch(tmp_path, sharding):
    splits = mapped(tmp_path, with_value(np.zeros(64, int), 50, 10))
    check_splits(splits, CLASSES)
    options = {"global_batch": 8, "seed": 0, "start_step": 0, "num_steps": 8, "shuffle": False, "limits": CLASSES}
    batches = train_batches(splits.train, sharding, **options)
    assert len([next(batches) for _ in range(6)]) == 6
    with pytest.raises(BadDataError, match="targets of example 50 of the training split is 10"):
        next(batches)


@pytest.mark.parametrize("threads", [0, 2])
def test_every_source_is_checked_where_it_is_read(threads, sharding):
    """The user's own source too, in whatever thread reads it."""
    examples = [{"inputs": np.int32([n]), "targets": np.int32([n]), "weights": np.float32([1])} for n in range(16)]
    limits = Limits(inputs=Limit("vocabulary", 13))
    with pytest.raises(
        BadDataError, match=r"inputs of example 13 of the evaluation split at \[0\] is 13; vocabulary=13"
    ):
        list(eval_batches(examples, sharding, global_batch=8, threads=threads, limits=limits))
    bad = [{**example, "weights": np.float32([np.nan])} for example in examples]
    with pytest.raises(BadDataError, match="weights of example 0 of the training split"):
        next(
            train_batches(
                bad, sharding, global_batch=8, seed=0, start_step=0, num_steps=1, shuffle=False, threads=threads
            )
        )


def test_the_stream_and_the_place_in_it_are_named():
    ids = np.arange(90)
    splits = Splits(WindowSource([Document(b"", ids, "first"), Document(b"", ids, "second")], 4), None, None, "")
    batch = splits.train.take(np.arange(len(splits.train)))
    limits = Limits(inputs=Limit("model.vocabulary", 87))
    from spmdkit.data.value_ranges import describe_example

    with pytest.raises(BadDataError, match=r"example 21 of the training split \(first, from token 84\) at \[3\] is 87"):
        check_rows(batch, limits, lambda row: describe_example(splits.train, "training", row))
    assert splits.train.origin(22) == "second, from token 0"


@pytest.mark.parametrize("make", [from_arrays, from_dataset, from_batches])
def test_rejects_a_vocabulary_below_1(make):
    rows = {"inputs": np.zeros((4, 3), np.float32), "targets": np.zeros(4, np.int32)}
    data = {from_arrays: rows, from_dataset: [(np.zeros(3), 0)] * 4, from_batches: lambda: iter([rows])}[make]
    with pytest.raises(UserError, match=r"vocabulary=-1 must be at least 1"):
        make(data, vocabulary=-1)
