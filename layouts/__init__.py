"""Layouts: which part of an array each device holds, by rules over paths."""

from .distribute import distribute_tensor as distribute_tensor
from .distribution import DataParallel as DataParallel
from .distribution import Distribution as Distribution
from .distribution import ModelParallel as ModelParallel
from .distribution import distribution as distribution
from .distribution import set_distribution as set_distribution
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
    "resolve",
    "resolve_optimizer_state",
    "set_distribution",
]
