"""Layouts: which part of an array each device holds, by rules over paths."""

from .layout_map import LayoutMap as LayoutMap
from .optimizer_state import resolve_optimizer_state as resolve_optimizer_state
from .problems import LayoutError as LayoutError
from .resolve import resolve as resolve
from .table import LayoutRow as LayoutRow
from .table import LayoutTable as LayoutTable
from .tensor_layout import TensorLayout as TensorLayout

__all__ = ["LayoutError", "LayoutMap", "LayoutRow", "LayoutTable", "TensorLayout", "resolve", "resolve_optimizer_state"]
