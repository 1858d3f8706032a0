"""Nested examples and flat batches."""

import numpy as np
import pytest
from spmdkit.data import BadDataError, eval_batches, from_arrays, nested
from spmdkit.data.examples import PAIR, as_array, as_arrays, flat, with_weights

A, B, C = (np.full(2, value) for value in range(3))


@pytest.mark.parametrize(
    ("example", "names"),
    [
        ({"image": A, "targets": {"label": B, "box": {"size": C}}}, ["image", "targets/label", "targets/box/size"]),
        ((A, B), ["inputs", "targets"]),
        ((A, {"label": B, "box": C}), ["inputs", "targets/label", "targets/box"]),
        ([A, [B, C]], ["inputs", "targets/0", "targets/1"]),
        ({"ids": [1, 2, 3], "number": 4}, ["ids", "number"]),  # numbers are an array, not entries
    ],
)
def test_names_are_joined(example, names):
    assert list(flat(example)) == names


def test_a_third_entry_of_a_tuple_is_weights():
    assert list(flat((A, B, C))) == ["inputs", "targets", "weights"]
    with pytest.raises(ValueError, match="an example has 3 entries, but 2 names"):
        flat((A, B, C), ("a", "b"))


def test_nested_arrays_become_batches(sharding):
    train = {"image": np.ones((12, 2, 2), np.float32), "targets": {"label": np.arange(12), "box": np.ones((12, 4))}}
    splits = from_arrays(train)
    *_, last = eval_batches(splits.train, sharding, global_batch=8)
    assert set(last) == {"image", "targets/label", "targets/box", "weights", "example"}
    assert nested(last)["targets"]["box"].shape == (8, 4)
    assert np.asarray(last["weights"]).tolist() == [1] * 4 + [0] * 4  # one for each row: no single target to count


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"inputs": {"a": [1.0, np.nan]}}, "inputs/a of example 1 .* is nan"),
        ({"targets": {"box": [1.0, np.inf]}}, "targets/box of example 1 .* is inf"),
        ({"targets/box": [np.nan, 1.0], "weights": [1.0, 0.0]}, "targets/box of example 0 .* is nan"),
        ({"weights": {"box": [-1.0, 1.0]}}, "weights/box of example 0 .* is -1.0: a weight must be finite"),
    ],
)
def test_nested_numbers_are_looked_at_as_others(arrays, message):
    with pytest.raises(BadDataError, match=message):
        from_arrays(arrays)


class TorchLike:
    """A tensor with a gradient, on a device: `detach` and `cpu` come before `numpy`."""

    def __init__(self, value, *done):
        self.value, self.done = value, done

    def detach(self):
        return TorchLike(self.value, "detach", *self.done)

    def cpu(self):
        return TorchLike(self.value, "cpu", *self.done)

    def numpy(self):
        if {*self.done} != {"detach", "cpu"}:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad.")
        return np.asarray(self.value)


class TensorFlowLike:
    def numpy(self):
        return np.float32(2)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (TorchLike([1, 2]), np.array([1, 2])),
        (TensorFlowLike(), np.array(2, np.float32)),
        (3, np.array(3)),
        (True, np.array(True)),
        ([[1.0, 2.0]], np.array([[1.0, 2.0]])),
        (np.arange(3, dtype=np.uint8), np.arange(3, dtype=np.uint8)),
    ],
)
def test_values_become_arrays(value, expected):
    found = as_array(value, "x")
    assert found.dtype == expected.dtype
    assert np.array_equal(found, expected)


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ((A, B, C, A), r"an example has 4 entries, but 2 names \(inputs, targets\)"),
        (3, "an example must be a dict of arrays, .*got a int"),
        ({"a/b": A, "a": {"b": B}}, "an example has 'a/b' twice"),
        ({"x": "text"}, "x contains <U4; examples must be numbers"),
        ({"x": [[1], [1, 2]]}, "x must be an array of numbers, got a list: "),
        ({"x": None}, "x contains object"),
        ({"x": np.array(["2020-01-01"], "M8[D]")}, "x contains datetime64"),
    ],
)
def test_rejects_invalid_examples(example, message):
    with pytest.raises(ValueError, match=message):
        as_arrays(example, PAIR)


@pytest.mark.parametrize(
    ("shapes", "dims", "expected"),
    [
        ({"inputs": (4, 3), "targets": (4,)}, 1, (4,)),
        ({"inputs": (4, 3), "targets": (4, 3)}, 1, (4, 3)),
        ({"inputs": (4, 3), "targets": (4, 1)}, 1, (4,)),
        ({"inputs": (4, 8, 8, 3), "targets": (4, 8, 8, 3)}, 1, (4,)),
        ({"image": (4, 3), "targets/box": (4, 5)}, 1, (4,)),
        ({"targets": (4, 3)}, 1, (4,)),
        ({"inputs": (3,), "targets": (3,)}, 0, (3,)),
        ({"inputs": (3,), "targets": ()}, 0, ()),
        ({"image": (3, 3)}, 0, ()),
    ],
)
def test_weights_of_one(shapes, dims, expected):
    found = with_weights({name: np.zeros(shape, np.int32) for name, shape in shapes.items()}, dims)["weights"]
    assert (found.shape, found.dtype, found.all()) == (expected, np.float32, True)
    for name in shapes:  # only integers beside integers are tokens
        floats = {other: np.zeros(shape, float if other == name else np.int32) for other, shape in shapes.items()}
        rows = next(iter(shapes.values()))[:dims]
        assert with_weights(floats, dims)["weights"].shape == (rows if name in ("inputs", "targets") else expected)
    assert with_weights({"weights": np.zeros(2)}, 1)["weights"].tolist() == [0, 0]
