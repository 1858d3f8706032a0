"""Data: sources, the global order of examples, and batches that Grain reads and a thread places on the mesh.

`open_splits(config)` gives training and evaluation examples with random access. `train_batches` and `eval_batches` turn
them into global arrays: the order of examples is a function of (seed, sample index), the same for any number of
processes (`ordering/`), and each process reads just the rows that its devices hold. Formats and kinds of objects are in
`sources/`, one file each.
"""

from .batches import abstract_batch as abstract_batch
from .batches import eval_batches as eval_batches
from .batches import train_batches as train_batches
from .bigram import bigram_loss as bigram_loss
from .config import DataConfig as DataConfig
from .config import MixturePart as MixturePart
from .examples import nested as nested
from .ordering.buckets import bucket_by_length as bucket_by_length
from .ordering.mixture import mix as mix
from .ordering.order import sample_order as sample_order
from .source import BadDataError as BadDataError
from .source import Source as Source
from .source import Splits as Splits
from .source import fingerprint as fingerprint
from .sources.arrays import from_arrays as from_arrays
from .sources.datasets import from_dataset as from_dataset
from .sources.datasets import from_frame as from_frame
from .sources.iterables import from_batches as from_batches
from .sources.iterables import from_examples as from_examples
from .splits import open_splits as open_splits
from .value_ranges import Limit as Limit
from .value_ranges import Limits as Limits
