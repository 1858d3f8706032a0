"""Layouts: the part of an array that each device holds, by rules over paths."""

from .distribution import DataParallel as DataParallel
from .distribution import Distribution as Distribution
from .distribution import ModelParallel as ModelParallel
from .distribution import distribute_tensor as distribute_tensor
from .distribution import distribution as distribution
from .distribution import set_distribution as set_distribution
from .imported_rules import from_flax_rules as from_flax_rules
from .imported_rules import from_keras as from_keras
from .imported_rules import from_tp_plan as from_tp_plan
from .layout_map import LayoutMap as LayoutMap
from .problems import LayoutError as LayoutError
from .resolve import resolve as resolve
from .resolve import resolve_optimizer_state as resolve_optimizer_state
from .table import LayoutRow as LayoutRow
from .table import LayoutTable as LayoutTable
from .tensor_layout import TensorLayout as TensorLayout
