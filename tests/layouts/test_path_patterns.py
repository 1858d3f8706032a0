import pytest
from spmdkit.layouts.path_patterns import meets, paths_met, pattern_problem, some

PATHS = ["embed/tokens", "blocks/mlp/up", "blocks/mlp/down", "head/norm"]


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("blocks/.*", "blocks/mlp/up", True),
        ("blocks/mlp", "blocks/mlp/up", False),  # all of the path
        ("w[0]", "w[0]", True),  # a path that is no expression of itself
        ("mlp/up", "blocks/mlp/up", False),
    ],
)
def test_what_an_expression_meets(pattern, path, expected):
    assert meets(pattern, path) is expected


def test_paths_by_expression():
    met = paths_met(("blocks/.*", "head/norm"), PATHS, "optimizer.freeze")
    assert met == {"blocks/.*": ["blocks/mlp/up", "blocks/mlp/down"], "head/norm": ["head/norm"]}


def test_expressions_that_meet_nothing_are_told_together():
    with pytest.raises(ValueError) as error:
        paths_met(("blocks/.*", "haed/.*", "0123456789"), PATHS, "optimizer.freeze")
    assert str(error.value).splitlines() == [
        "optimizer.freeze: 'haed/.*' matches no parameter. Did you mean head/norm?",
        "optimizer.freeze: '0123456789' matches no parameter. There are embed/tokens, blocks/mlp/up, blocks/mlp/down "
        "and 1 more.",
    ]


def test_what_is_no_expression():
    assert pattern_problem("blocks/.*") is None
    assert "'(' is not a regular expression" in str(pattern_problem("("))
    assert "3 is a int" in str(pattern_problem(3))


def test_some():
    assert some(PATHS[:2]) == "embed/tokens, blocks/mlp/up"
    assert some([]) == ""
