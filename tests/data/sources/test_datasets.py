"""Datasets with random access and tables of columns: any with `len` and `[i]`, no library of theirs needed."""

import numpy as np
import pytest
from spmdkit.data import BadDataError, from_dataset, from_frame, train_batches
from spmdkit.data.source import take


class Squares:
    """As a PyTorch dataset of (number, square)."""

    def __init__(self, size=20, noise=None):
        self.size, self.noise, self.read = size, noise, []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.read.append(index)
        noise = self.noise.random() if self.noise else 0
        return np.array([index, noise], np.float32), index**2


class InOne(Squares):
    """One that reads many at once."""

    def __getitems__(self, indices):
        return [(np.array([index, 0], np.float32), index**2) for index in indices]


@pytest.mark.parametrize("kind", [Squares, InOne])
def test_examples_are_read_where_batches_need_them(kind, sharding):
    dataset = kind()
    splits = from_dataset(dataset)
    dataset.read.clear()
    (batch,) = train_batches(splits.train, sharding, global_batch=8, seed=0, start_step=0, num_steps=1)
    assert np.array_equal(np.asarray(batch["inputs"])[:, 0] ** 2, np.asarray(batch["targets"]))
    assert np.asarray(batch["weights"]).tolist() == [1.0] * 8
    assert len(dataset.read) == (8 if kind is Squares else 0)
    assert splits.description == f"{kind.__name__}: 20 examples"


def test_examples_that_are_mappings():
    examples = [{"image": np.full((2, 2), i), "targets": {"label": i, "box": [0.5, i]}} for i in range(6)]
    splits = from_dataset(examples[:4], examples[4:])
    assert set(splits.train[0]) == {"image", "targets/label", "targets/box", "weights"}
    assert take(splits.evaluation, np.array([1]))["targets/label"].tolist() == [5]
    assert splits.description == "list: 4 and 2 examples"
    assert len(from_dataset(examples[:4], examples[4:], eval_fraction=0.5).train) == 4, "a given split counts"


def test_some_are_held_out_by_their_number():
    splits = from_dataset(Squares(200), eval_fraction=0.25)
    numbers = [[int(each[i]["inputs"][0]) for i in range(len(each))] for each in (splits.train, splits.evaluation)]
    assert sorted(numbers[0] + numbers[1]) == list(range(200))
    assert 30 < len(numbers[1]) < 70
    more = from_dataset(Squares(201), eval_fraction=0.25)
    held_out = {int(more.evaluation[i]["inputs"][0]) for i in range(len(more.evaluation))}
    assert held_out - {200} == set(numbers[1])  # one more example moves no other
    assert splits.train.origin(3) == f"example {numbers[0][3]} of the Squares"


def test_the_fingerprint_changes_with_the_examples():
    def mark(examples):
        return from_dataset(examples).fingerprint

    examples = [(np.zeros(2), i) for i in range(5)]
    assert mark(examples) == mark(list(examples)) != ""
    assert len({mark(examples), mark(examples[:4]), mark([*examples[:4], (np.ones(2), 4)])}) == 3
    assert from_dataset(examples, examples[:2]).fingerprint != from_dataset(examples, examples[1:3]).fingerprint


def test_examples_that_vary_are_refused_or_asked_for():
    noisy = Squares(noise=np.random.default_rng(0))
    with pytest.raises(ValueError, match=r"the first example of the Squares differs .*varies=True"):
        from_dataset(noisy)
    assert from_dataset(noisy, varies=True).fingerprint == ""


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (iter([1]), {}, r"a list_iterator does not support random access.*from_batches or from_examples"),
        ([], {}, "the list is empty"),
        ([(1, "a")], {}, "targets contains <U1; examples must be numbers"),
        ([(1, 2)], {"eval_fraction": 0.5}, r"eval_fraction=0\.5 of 1 rows holds out .*: both splits need rows"),
    ],
)
def test_rejects_invalid_datasets(dataset, options, message):
    with pytest.raises(ValueError, match=message):
        from_dataset(dataset, **options)


def test_examples_of_other_shapes_are_named():
    source = from_dataset([(np.zeros(2), 0), (np.zeros(3), 0)]).train
    with pytest.raises(ValueError, match=r"example 0 has .*\(2,\).*, but example 1 has .*\(3,\)"):
        take(source, np.array([0, 1]))


def test_what_a_dataset_raises_is_told_with_its_place():
    class Broken(Squares):
        def __getitem__(self, index):
            if index == 5:
                raise KeyError("no such file")
            return super().__getitem__(index)

    source = from_dataset(Broken(size=4)).train
    with pytest.raises(ValueError, match=r"example 5 of the Broken fails in .*test_datasets\.py, line \d+ .*KeyError"):
        source[5]


class Column:
    def __init__(self, values):
        self.values = values

    def to_numpy(self):
        return self.values


class Frame(dict):
    """As a table of pandas or Polars."""

    @property
    def columns(self):
        return list(self)

    def __getitem__(self, name):
        return Column(super().__getitem__(name))


def cells(*values):
    found = np.empty(len(values), object)
    found[:] = values
    return found


@pytest.fixture
def frame():
    numbers = {"x": np.arange(6.0), "y": np.arange(6) * 2, "label": np.arange(6) % 2}
    vectors = [np.full(3, i) for i in range(6)]
    return Frame(**numbers, vector=cells(*vectors), name=cells(*"abcdef"))


def test_columns_become_arrays(frame):
    splits = from_frame(frame, columns={"inputs": ["x", "y"], "targets": "label", "extra": "vector"})
    example = splits.train[3]
    assert (example["inputs"].tolist(), int(example["targets"]), example["extra"].tolist()) == ([3, 6], 1, [3, 3, 3])


def test_every_column_by_default(frame):
    del frame["name"]
    splits = from_frame(frame, eval_fraction=0.5)
    assert set(splits.train[0]) == {"x", "y", "label", "vector", "weights"}
    assert len(splits.train) + len(splits.evaluation) == 6


def test_a_mapping_of_columns_is_a_table():
    columns = {"x": [0.0, 1.0, 2.0], "y": (3, 4, 5), "vector": np.ones((3, 2)), "label": [0, 1, 0]}
    example = from_frame(columns, columns={"inputs": ["x", "y"], "targets": "label", "vector": "vector"}).train[2]
    assert (example["inputs"].tolist(), int(example["targets"]), example["vector"].tolist()) == ([2, 5], 0, [1, 1])


def test_a_table_of_arrow_names_its_columns():
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"x": [0.0, 1.0], "label": [0, 1]})
    assert float(from_frame(table, columns={"inputs": "x", "targets": "label"}).train[1]["inputs"]) == 1


@pytest.mark.parametrize(
    ("table", "columns", "message"),
    [
        (None, {"inputs": "z"}, "unknown column 'z'; the columns of the table are x, y, label, vector, name"),
        (None, {"inputs": "name"}, "column 'name' contains object; examples must be numbers"),
        (Frame(v=cells(np.zeros(2), np.zeros(3))), None, "the cells of column 'v' have the shapes"),
        ([1], None, "got a list"),
    ],
)
def test_rejects_invalid_columns(frame, table, columns, message):
    with pytest.raises(ValueError, match=message):
        from_frame(frame if table is None else table, columns=columns)


def test_missing_values_of_a_table_are_bad_data():
    with pytest.raises(BadDataError, match=r"inputs of example 1 .* is nan"):
        from_frame(Frame(inputs=np.array([1.0, np.nan])))
