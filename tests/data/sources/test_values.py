"""What other libraries give, as arrays; their tensors are imitated, so that none has to be installed."""

import numpy as np
import pytest
from spmdkit.data.sources.values import as_array, as_arrays, with_weights


class TorchLike:
    """A tensor with a gradient, on a device: `detach` and `cpu` come before `numpy`."""

    def __init__(self, value, ready=False):
        self.value, self.ready = value, ready

    def detach(self):
        return self

    def cpu(self):
        return TorchLike(self.value, ready=True)

    def numpy(self):
        if not self.ready:
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
    ("value", "message"),
    [
        ("text", "x holds <U4; examples hold numbers"),
        ([[1], [1, 2]], "x is a list that is no array of numbers: "),
        (None, "x holds object"),
        (np.array(["2020-01-01"], "M8[D]"), "x holds datetime64"),
    ],
)
def test_values_that_are_no_numbers(value, message):
    with pytest.raises(ValueError, match=message):
        as_array(value, "x")


def test_examples_of_tuples_and_mappings():
    assert list(as_arrays((1, {"a": 2}), ("inputs", "targets"))) == ["inputs", "targets/a"]


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
