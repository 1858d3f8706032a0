"""Layouts: which part of an array each device holds, by rules over paths.

`distribution_base` shares the tests of `distribution`; `output_rules` shares the tests of
`parallel/sharding/named_outputs`; `problems` shares the tests of `resolve`.
"""

from .distribute import distribute_tensor as distribute_tensor
from .distribution import DataParallel as DataParallel
from .distribution import Distribution as Distribution
from .distribution import ModelParallel as ModelParallel
from .distribution import distribution as distribution
from .distribution import set_distribution as set_distribution
from .importing import from_flax_rules as from_flax_rules
from .importing import from_keras as from_keras
from .importing import from_partition_rules as from_partition_rules
from .importing import from_t5x_rules as from_t5x_rules
from .importing import from_tp_plan as from_tp_plan
from .layout_map import LayoutMap as LayoutMap
from .optimizer_state import resolve_optimizer_state as resolve_optimizer_state
from .problems import LayoutError as LayoutError
from .resolve import resolve as resolve
from .table import LayoutRow as LayoutRow
from .table import LayoutTable as LayoutTable
from .tensor_layout import TensorLayout as TensorLayout

__all__ = [
    "DataParallel",
    "Distribution",
    "LayoutError",
    "LayoutMap",
    "LayoutRow",
    "LayoutTable",
    "ModelParallel",
    "TensorLayout",
    "distribute_tensor",
    "distribution",
    "from_flax_rules",
    "from_keras",
    "from_partition_rules",
    "from_t5x_rules",
    "from_tp_plan",
    "resolve",
    "resolve_optimizer_state",
    "set_distribution",
]
