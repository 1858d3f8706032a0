"""Paths of leaves, and patterns that select them."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import pytest
from spmdkit.layouts.paths import (
    joined_path,
    leaves_with_paths,
    map_with_path,
    match_paths,
    matches,
    nest,
    numberless,
    pattern_problem,
)


class Pair(NamedTuple):
    left: Any
    right: Any


@jax.tree_util.register_dataclass
@dataclass
class Dense:
    kernel: Any
    bias: Any


@pytest.mark.parametrize(
    ("tree", "leaves"),
    [
        ([{"q": 3}, Pair(left=4, right=(5,))], [("0/q", 3), ("1/left", 4), ("1/right/0", 5)]),
        ({"dense": Dense(kernel=1, bias=2)}, [("dense/kernel", 1), ("dense/bias", 2)]),
        ({7: {"x": 1}}, [("7/x", 1)]),
        (1.0, [("", 1.0)]),
        (None, []),
    ],
)
def test_paths_join_keys_indices_and_fields(tree, leaves):
    assert leaves_with_paths(tree) == leaves


def test_nests_leaves_by_path():
    tree = {"dense": {"kernel": 1, "bias": 2}, "scale": 3}
    assert nest(dict(leaves_with_paths(tree))) == tree


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
def test_joins_paths_of_a_stack(paths, expected):
    assert joined_path(paths) == expected
    assert len({numberless(path) for path in paths}) == 1


def test_replaces_only_whole_names():
    assert numberless("dense_1/12/w2") == "dense_1/*/w2"


PATHS = ["embed/tokens", "blocks/mlp/up", "blocks/mlp/down", "head/norm"]


def test_finds_paths_by_pattern():
    met = match_paths(("blocks/.*", "head/norm"), PATHS, "optimizer.freeze")
    assert met == {"blocks/.*": ["blocks/mlp/up", "blocks/mlp/down"], "head/norm": ["head/norm"]}
    assert matches("w[0]", "w[0]"), "a path that is no expression of itself"


def test_reports_all_unmatched_patterns():
    with pytest.raises(ValueError) as error:
        match_paths(("blocks/.*", "haed/.*", "blocks/mlp", "0123456789"), PATHS, "optimizer.freeze")
    assert str(error.value).splitlines() == [
        "optimizer.freeze: 'haed/.*' matches no parameter. Did you mean head/norm?",
        "optimizer.freeze: 'blocks/mlp' matches no parameter. Did you mean blocks/mlp/up?",
        "optimizer.freeze: '0123456789' matches no parameter. The parameters are embed/tokens, blocks/mlp/up, "
        "blocks/mlp/down and 1 more.",
    ]


def test_rejects_invalid_patterns():
    assert pattern_problem("blocks/.*") is None
    assert "'(' is not a valid regular expression" in str(pattern_problem("("))
    assert "got 3 (int)" in str(pattern_problem(3))
