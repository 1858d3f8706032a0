"""Data: sources, the global order of examples, and batches that Grain reads and a thread places on the mesh.

`open_splits(config)` gives training and evaluation examples with random access. `train_batches` and `eval_batches` turn
them into global arrays: the order of examples is a function of (seed, sample index), the same for any number of
processes (`ordering/`), and each process reads just the rows that its devices hold. Formats and kinds of objects are in
`sources/`, one file each.
"""

from .batches import abstract_batch, eval_batches, train_batches
from .bigram import bigram_loss
from .config import DataConfig, MixturePart
from .examples import nested
from .ordering.buckets import bucket_by_length
from .ordering.mixture import mix
from .ordering.order import sample_order
from .source import BadDataError, Source, Splits, fingerprint
from .sources.arrays import from_arrays
from .sources.datasets import from_dataset, from_frame
from .sources.iterables import from_batches, from_examples
from .splits import open_splits
from .value_ranges import Limit, Limits

__all__ = [
    "BadDataError",
    "DataConfig",
    "Limit",
    "Limits",
    "MixturePart",
    "Source",
    "Splits",
    "abstract_batch",
    "bigram_loss",
    "bucket_by_length",
    "eval_batches",
    "fingerprint",
    "from_arrays",
    "from_batches",
    "from_dataset",
    "from_examples",
    "from_frame",
    "mix",
    "nested",
    "open_splits",
    "sample_order",
    "train_batches",
]
