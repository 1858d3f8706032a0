"""LayoutMap: the rules of look-up, what Keras does quietly and this does loudly, match modes."""

import pytest
from spmdkit.layouts import LayoutMap, TensorLayout
from spmdkit.mesh import DeviceMesh


@pytest.fixture
def rules(mesh) -> LayoutMap:
    """The map of Keras's own tests."""
    rules = LayoutMap(mesh)
    rules["dense/kernel"] = TensorLayout((None, "model"))
    rules["dense/bias"] = TensorLayout(("model",))
    rules[".*dense.*kernel"] = TensorLayout(("model", None))
    rules[".*dense.*bias"] = TensorLayout(("data",))
    rules[".*bias"] = TensorLayout(("model",))
    return rules


def test_takes_layouts_and_tuples(mesh):
    rules, layout = LayoutMap(mesh), TensorLayout((None, "model"))
    rules["dense/kernel"] = layout
    rules["dense/bias"] = ("model",)
    assert rules["dense/kernel"] is layout
    assert rules["dense/bias"] == TensorLayout(("model",), mesh)
    assert all(value.device_mesh is mesh for value in rules.values())
    assert rules.device_mesh is mesh


def test_rejects_a_key_twice(rules):
    with pytest.raises(ValueError, match="dense/kernel already exist in the LayoutMap with value"):
        rules["dense/kernel"] = ("model", None)


@pytest.mark.parametrize("value", [["model"], "model", None, 3])
def test_rejects_other_values(rules, value):
    with pytest.raises(ValueError, match="should be a TensorLayout type"):
        rules["conv/kernel"] = value
    assert "conv/kernel" not in rules


def test_says_how_to_write_a_list(rules):
    with pytest.raises(ValueError, match=r"Write \(None, 'model'\)"):
        rules["conv/kernel"] = [None, "model"]


@pytest.mark.parametrize(
    ("path", "axes"),
    [
        ("dense/kernel", (None, "model")),  # the exact key wins
        ("dense/bias", ("model",)),  # though two expressions match as well
        ("dense_2/kernel", ("model", None)),
        ("model/dense_2/kernel", ("model", None)),
        ("conv/bias", ("model",)),
    ],
)
def test_looks_up(rules, path, axes):
    assert rules[path].axes == axes


def test_two_matches_are_an_error(rules):
    with pytest.raises(ValueError, match=r"Path 'dense_2/bias' matches multiple layout specification keys: .*dense"):
        rules["dense_2/bias"]


@pytest.mark.parametrize("path", ["conv/kernel", "dense_2/kernel_1", "xdense/kernel/y", ""])
def test_no_match_is_none(rules, path):
    assert rules[path] is None  # the whole path must match


def test_order_of_insertion_is_no_matter(rules, mesh):
    turned = LayoutMap(mesh)
    for key, layout in reversed(list(rules.items())):
        turned[key] = layout
    assert all(turned[path] == rules[path] for path in ("dense/bias", "dense_2/kernel", "conv/bias"))


def test_pop_and_del_take_keys(rules):
    assert rules.pop("dense/kernel").axes == (None, "model")
    assert rules["dense/kernel"].axes == ("model", None)  # now by the expression
    with pytest.raises(KeyError):
        rules.pop("dense_2/kernel")  # an expression matches, but it is no key
    del rules[".*dense.*kernel"]
    assert rules["dense/kernel"] is None
    with pytest.raises(KeyError):
        del rules[".*dense.*kernel"]


def test_length_and_order(rules):
    keys = ["dense/kernel", "dense/bias", ".*dense.*kernel", ".*dense.*bias", ".*bias"]
    assert len(rules) == 5
    assert list(rules) == list(rules.keys()) == [key for key, _ in rules.items()] == keys
    assert [layout.axes for layout in rules.values()][:2] == [(None, "model"), ("model",)]


# Loud where Keras is quiet


def test_in_tells_the_truth(rules):
    assert "dense/kernel" in rules
    assert ".*bias" in rules
    assert "conv/kernel" not in rules
    assert "conv/bias" not in rules  # a path with a layout, but no key


def test_get_gives_the_default(rules):
    assert rules.get("conv/kernel", "none") == "none"
    assert rules.get("conv/kernel") is None
    assert rules.get("conv/bias", "none").axes == ("model",)


def test_pop_gives_the_default(rules):
    assert rules.pop("conv/kernel", None) is None
    assert len(rules) == 5


def test_setdefault_adds(rules):
    assert rules.setdefault("conv/kernel", (None, "model")).axes == (None, "model")
    assert rules.setdefault("conv/kernel", ("data",)).axes == (None, "model")
    assert "conv/kernel" in rules


def test_a_bad_expression_fails_at_once(rules):
    with pytest.raises(ValueError, match=r"Rule '\*bias' is not a valid regular expression: nothing to repeat at pos"):
        rules["*bias"] = ("model",)
    assert len(rules) == 5


def test_a_layout_of_another_mesh_fails(rules):
    other = DeviceMesh((4, 2), ("data", "model"))
    with pytest.raises(ValueError, match="of rule 'conv/bias' belongs to another mesh"):
        rules["conv/bias"] = TensorLayout(("model",), other)


def test_a_layout_of_an_equal_mesh_is_welcome(rules):
    rules["conv/bias"] = TensorLayout(("model",), DeviceMesh((2, 4), ("data", "model")))
    assert rules["conv/bias"].axes == ("model",)


def test_an_unknown_axis_fails_at_once(rules):
    with pytest.raises(ValueError, match=r"Invalid axis names for Layout.*Did you mean 'model'"):
        rules["conv/bias"] = ("modle",)
    assert "conv/bias" not in rules


def test_rejects_what_is_no_mesh():
    with pytest.raises(ValueError, match=r"LayoutMap needs a DeviceMesh, not \(2, 4\) \(tuple\)"):
        LayoutMap((2, 4))


# Match modes


def test_search_matches_any_part(mesh):
    rules = LayoutMap(mesh, match="search")
    rules["dense"] = ("model",)
    assert rules["model/dense_1/bias"].axes == ("model",)


def test_first_takes_the_rule_added_first(mesh):
    rules = LayoutMap(mesh, match="first")
    rules[".*dense.*bias"] = ("model",)
    rules[".*bias"] = ("data",)
    rules["dense_3/bias"] = (None,)
    assert rules["dense_2/bias"].axes == ("model",)
    assert rules["conv/bias"].axes == ("data",)
    assert rules["dense_3/bias"].axes == (None,)  # the exact key still wins
    assert rules.keys_matching("dense_3/bias") == (".*dense.*bias", ".*bias", "dense_3/bias")
    assert rules["bias/2"] is None  # the whole path must match


def test_rejects_an_unknown_mode(mesh):
    with pytest.raises(ValueError, match=r"Unknown layouts.match 'full'; known: fullmatch, search, first"):
        LayoutMap(mesh, match="full")


def test_tuples_of_axes(mesh):
    rules = LayoutMap(mesh)
    rules["embed"] = (("data", "model"), None)
    assert rules["embed"].shard_shape((16, 2)) == (2, 2)
    assert repr(rules) == "LayoutMap({'embed': ((data, model), None)}, match='fullmatch')"
