"""LayoutMap: regular expressions for parameter paths, and their layouts."""

import re
from collections.abc import Iterable, Iterator, MutableMapping
from functools import cache
from typing import Any, Literal, get_args

from jax.sharding import PartitionSpec

from ..mesh.device_mesh import DeviceMesh
from ..mesh.errors import UserError, unknown_name
from .paths import pattern_problem
from .tensor_layout import TensorLayout

MatchMode = Literal["fullmatch", "search", "first"]


class LayoutMap(MutableMapping[str, Any]):
    """Layout rules in order: a regular expression for paths, and the layout of the paths that it matches.

    Lookup of a path takes the rule with the path as its key, or else the one rule with an expression that matches. Two
    matches are an error; without a match, the result is None. All other methods (`in`, `len`, iteration, `del`, `pop`,
    `setdefault`) use the keys as written; `get` is a lookup with a default.

    Attributes:
        device_mesh: The mesh of every layout in the map.
        match: The mode of matching.

    Example:
        rules = LayoutMap(mesh)
        rules[".*dense.*kernel"] = (None, "model")
        rules[".*dense.*bias"] = ("model",)
        rules["model/dense_1/kernel"].axes          # (None, "model")
    """

    def __init__(self, device_mesh: DeviceMesh, match: MatchMode = "fullmatch") -> None:
        r"""Creates an empty map.

        Args:
            device_mesh: The mesh of every layout in the map.
            match: "fullmatch": an expression must match the whole path. "search": it can match any part of it.
                "first": as "fullmatch", but of several matches the first rule is used.

        Raises:
            UserError: `device_mesh` is not a DeviceMesh, or `match` is unknown.
        """
        if not isinstance(device_mesh, DeviceMesh):
            raise UserError(f"LayoutMap needs a DeviceMesh, got {device_mesh!r} ({type(device_mesh).__name__}).")
        if match not in get_args(MatchMode):
            raise UserError(unknown_name("layouts.match", match, get_args(MatchMode)))
        self.device_mesh = device_mesh
        self.match: MatchMode = match
        self._layouts: dict[str, TensorLayout] = {}

    def __setitem__(self, key: str, layout: TensorLayout | tuple) -> None:
        """Adds a rule; converts a tuple of axis names to a TensorLayout, and sets its mesh."""
        if not isinstance(key, str):
            raise UserError(
                f"The key of a rule must be a string (a regular expression), got {key!r} ({type(key).__name__})."
            )
        if key in self._layouts:
            raise UserError(
                f"{key} already exist in the LayoutMap with value {self._layouts[key]}. Delete it first, or change "
                "the new key."
            )
        if isinstance(layout, tuple):
            layout = TensorLayout(layout)
        if not isinstance(layout, TensorLayout):
            remedy = f" Write {tuple(layout)}." if isinstance(layout, list | PartitionSpec) else ""
            raise UserError(
                f"The value of rule {key!r} should be a TensorLayout type (or a tuple of axis names), got {layout!r} "
                f"of type {type(layout).__name__}.{remedy}"
            )
        _compiled(key)
        if layout.device_mesh is None:
            layout.device_mesh = self.device_mesh
        if layout.device_mesh != self.device_mesh:
            raise UserError(
                f"The layout {layout} of rule {key!r} has another mesh, {layout.device_mesh!r}, than this LayoutMap, "
                f"{self.device_mesh!r}. Remove the layout's mesh, or use the map's."
            )
        self._layouts[key] = layout

    def __getitem__(self, path: str) -> TensorLayout | None:
        """Returns the layout of a path's rule, or None; UserError if several rules match."""
        keys = self.deciding_keys(path)
        if len(keys) > 1:
            raise UserError(
                f"Path '{path}' matches multiple layout specification keys: {list(keys)}. Please make the keys more "
                'specific, so that one matches, or use match="first" (layouts.match: first).'
            )
        return self._layouts[keys[0]] if keys else None

    def get(self, path: str, default: Any = None) -> Any:
        """Returns the layout of a path's rule, or the default."""
        layout = self[path]
        return default if layout is None else layout

    def deciding_keys(self, path: str) -> tuple[str, ...]:
        """Returns the key of a path's rule; several keys if the rules are ambiguous for this path."""
        if path in self._layouts:
            return (path,)
        keys = self.keys_matching(path)
        return keys[:1] if self.match == "first" else keys

    def keys_matching(self, path: str) -> tuple[str, ...]:
        """Returns the keys of all rules that match a path, in order."""
        test = re.Pattern.search if self.match == "search" else re.Pattern.fullmatch
        return tuple(key for key in self._layouts if key == path or test(_compiled(key), path))

    def keys_in_use(self, paths: Iterable[str]) -> set[str]:
        """Returns the keys of the rules that match at least one path."""
        keys: set[str] = set()
        for path in paths:
            keys.update(self.keys_matching(path))
        return keys

    def __delitem__(self, key: str) -> None:
        del self._layouts[key]

    def pop(self, key: str, *default: Any) -> Any:
        """Removes the rule with this key (not a path); returns its layout or the default."""
        return self._layouts.pop(key, *default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Adds a rule unless its key exists; returns the layout of that key."""
        if key not in self._layouts:
            self[key] = default
        return self._layouts[key]

    def __contains__(self, key: object) -> bool:
        return key in self._layouts

    def __iter__(self) -> Iterator[str]:
        return iter(self._layouts)

    def __len__(self) -> int:
        return len(self._layouts)

    def __repr__(self) -> str:
        rules = ", ".join(f"{key!r}: {layout}" for key, layout in self._layouts.items())
        return f"LayoutMap({{{rules}}}, match={self.match!r})"


@cache
def _compiled(key: str) -> re.Pattern[str]:
    problem = pattern_problem(key)
    if problem is not None:
        raise UserError(f"Rule {problem} Escape special characters with a backslash, and write '.*' for any text.")
    return re.compile(key)
