"""Paths of leaves."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import pytest
from spmdkit.layouts.paths import joined_path, leaves_with_paths, map_with_path, numberless


class Pair(NamedTuple):
    left: Any
    right: Any


@jax.tree_util.register_dataclass
@dataclass
class Dense:
    kernel: Any
    bias: Any


TREE = {"dense": Dense(kernel=1, bias=2), "blocks": [{"q": 3}, Pair(left=4, right=(5,))], 7: None, "none": None}


def test_paths_join_keys_indices_and_fields():
    assert leaves_with_paths(TREE["blocks"]) == [("0/q", 3), ("1/left", 4), ("1/right/0", 5)]
    assert leaves_with_paths({"dense": TREE["dense"]}) == [("dense/kernel", 1), ("dense/bias", 2)]
    assert leaves_with_paths({7: {"x": 1}}) == [("7/x", 1)]


def test_a_leaf_has_an_empty_path():
    assert leaves_with_paths(1.0) == [("", 1.0)]
    assert leaves_with_paths({}) == leaves_with_paths(None) == []


def test_maps_with_paths_over_several_trees():
    tree = {"a": [1, 2]}
    assert map_with_path(lambda path, x, y: f"{path}={x + y}", tree, {"a": [10, 20]}) == {"a": ["a/0=11", "a/1=22"]}


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["w"], "w"),
        (["b/0/w", "b/1/w", "b/2/w"], "b/{0..2}/w"),
        (["b/0/w", "b/2/w"], "b/{0,2}/w"),
        (["0/b/1", "0/b/2"], "0/b/{1..2}"),
    ],
)
def test_paths_of_a_stack_are_one(paths, expected):
    assert joined_path(paths) == expected
    assert len({numberless(path) for path in paths}) == 1


def test_only_whole_names_are_numbers():
    assert numberless("dense_1/12/w2") == "dense_1/*/w2"
