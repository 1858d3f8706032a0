"""Data of other libraries: the sources of data_loaders.yaml.

`dataset` has random access (what a PyTorch or Hugging Face `Dataset` is), `loader` gives batches one after the other
(what a PyTorch `DataLoader` or `tf.data` is), `table` is a DataFrame. None of these libraries is needed to run this.
"""

from collections.abc import Iterator

import numpy as np
from spmdkit.data import DataConfig, Splits, from_batches, from_dataset, from_frame

FEATURES, CLASSES, ROWS = 8, 3, 3000


class Blobs:
    """Points around one centre a class; example i is drawn from its number, so it is the same whenever it is read."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, number: int) -> tuple[np.ndarray, int]:
        label = number % CLASSES
        noise = np.random.default_rng(number).normal(size=FEATURES)
        return (noise + 2 * np.eye(CLASSES, FEATURES)[label]).astype(np.float32), label


def dataset(config: DataConfig) -> Splits:
    """`data.source: data_loaders:dataset`: the runtime shuffles, every process reads its own rows."""
    return from_dataset(Blobs(), eval_fraction=config.eval_fraction)


def batches(epoch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The batches of one epoch: here a `DataLoader` would be made, its generator seeded by the epoch."""
    order = np.random.default_rng([1, epoch]).permutation(ROWS - 300)
    for start in range(0, len(order), 64):
        points, labels = zip(*(Blobs()[number] for number in order[start : start + 64]), strict=True)
        yield np.stack(points), np.array(labels)


def loader(config: DataConfig) -> Splits:
    """`data.source: data_loaders:loader`: the rows of a stream are the samples; held-out ones are kept in memory."""
    held_out = [tuple(map(np.array, zip(*(Blobs()[number] for number in range(ROWS - 300, ROWS)), strict=True)))]
    return from_batches(batches, held_out)


def table(config: DataConfig) -> Splits:
    """`data.source: data_loaders:table`: columns of a DataFrame by name; needs pandas."""
    import pandas

    points, labels = zip(*(Blobs()[number] for number in range(ROWS)), strict=True)
    frame = pandas.DataFrame(np.stack(points), columns=[f"x{number}" for number in range(FEATURES)])
    frame["label"] = labels
    columns = {"inputs": [f"x{number}" for number in range(FEATURES)], "targets": "label"}
    return from_frame(frame, columns=columns, eval_fraction=config.eval_fraction)
