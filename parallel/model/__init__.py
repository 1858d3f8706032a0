"""The definition of a model, and the results of its loss.

In: pure functions of the user. Out: a `Model` or a `BlockModel` (`definition`); every strategy runs its loss.
Read first: `definition`; then `loss_sums` (metrics, and the state of a model).
"""

from .definition import LOGITS as LOGITS
from .definition import ROWS as ROWS
from .definition import AbstractBatch as AbstractBatch
from .definition import Activations as Activations
from .definition import Batch as Batch
from .definition import BlockModel as BlockModel
from .definition import Model as Model
from .definition import ParallelContext as ParallelContext
from .definition import Params as Params
from .definition import fold_block as fold_block
from .definition import has_state as has_state
from .definition import join_differentiable as join_differentiable
from .definition import split_differentiable as split_differentiable
from .definition import with_state as with_state
from .definition import without_predict as without_predict
