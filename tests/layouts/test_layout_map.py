"""LayoutMap: lookup of paths, methods on keys, invalid rules, match modes."""

import pytest
from jax.sharding import PartitionSpec
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
    rules["embed"] = TensorLayout((("data", "model"), None), DeviceMesh((2, 4), ("data", "model")))  # an equal mesh
    assert rules["dense/kernel"] is layout
    assert layout.device_mesh is rules.device_mesh is mesh
    assert rules["dense/bias"] == TensorLayout(("model",), mesh)
    assert repr(rules).endswith("'dense/bias': (model,), 'embed': ((data, model), None)}, match='fullmatch')")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("dense/kernel", ("model", None), "dense/kernel already exist in the LayoutMap with value"),
        ("conv/kernel", "model", "should be a TensorLayout type"),
        ("conv/kernel", None, "should be a TensorLayout type"),
        ("conv/kernel", [None, "model"], r"should be a TensorLayout type .* Write \(None, 'model'\)"),
        ("conv/kernel", PartitionSpec("data", None), r"Write \('data', None\)"),
        ("conv/kernel", ("modle",), r"Invalid axis names for Layout.*Did you mean 'model'"),
        ("*bias", ("model",), r"Rule '\*bias' is not a valid regular expression: nothing to repeat at pos"),
        (3, ("data",), "must be a string .*, got 3"),
        (["conv"], ("data",), r"must be a string .*, got \['conv'\] \(list\)"),
    ],
)
def test_rejects_invalid_rules(rules, key, value, message):
    with pytest.raises(ValueError, match=message):
        rules[key] = value
    assert len(rules) == 5


def test_rejects_a_layout_of_another_mesh(rules):
    with pytest.raises(ValueError, match="of rule 'conv/bias' has another mesh"):
        rules["conv/bias"] = TensorLayout(("model",), DeviceMesh((4, 2), ("data", "model")))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("path", "axes"),
    [
        ("dense/kernel", (None, "model")),  # the exact key wins
        ("dense/bias", ("model",)),  # though two expressions match as well
        ("dense_2/kernel", ("model", None)),
        ("model/dense_2/kernel", ("model", None)),
        ("conv/bias", ("model",)),
        ("conv/kernel", None),
        ("xdense/kernel/y", None),  # the whole path must match
        ("", None),
    ],
)
def test_looks_up_in_any_order_of_insertion(rules, mesh, path, axes, turned):
    if turned:
        given, rules = rules, LayoutMap(mesh)
        for key, layout in reversed(list(given.items())):
            rules[key] = layout
    assert rules[path] == (None if axes is None else TensorLayout(axes, mesh))


def test_two_matches_are_an_error(rules):
    with pytest.raises(ValueError, match=r"Path 'dense_2/bias' matches multiple layout specification keys: .*dense"):
        rules["dense_2/bias"]


def test_pop_and_del_take_keys(rules):
    assert rules.pop("dense/kernel").axes == (None, "model")
    assert rules["dense/kernel"].axes == ("model", None)  # now by the expression
    with pytest.raises(KeyError):
        rules.pop("dense_2/kernel")  # an expression matches, but it is no key
    assert rules.pop("conv/kernel", None) is None
    del rules[".*dense.*kernel"]
    assert rules["dense/kernel"] is None
    with pytest.raises(KeyError):
        del rules[".*dense.*kernel"]


def test_other_methods_take_keys_and_get_a_path(rules):
    keys = ["dense/kernel", "dense/bias", ".*dense.*kernel", ".*dense.*bias", ".*bias"]
    assert len(rules) == 5
    assert list(rules) == list(rules.keys()) == [key for key, _ in rules.items()] == keys
    assert [layout.axes for layout in rules.values()][:2] == [(None, "model"), ("model",)]
    assert ".*bias" in rules
    assert "conv/bias" not in rules  # a path with a layout, but no key
    assert rules.get("conv/kernel", "none") == "none"
    assert rules.get("conv/kernel") is None
    assert rules.get("conv/bias", "none").axes == ("model",)
    assert rules.setdefault("conv/kernel", (None, "model")).axes == (None, "model")
    assert rules.setdefault("conv/kernel", ("data",)).axes == (None, "model")


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


def test_rejects_invalid_arguments(mesh):
    with pytest.raises(ValueError, match=r"Unknown layouts.match 'full'; known: fullmatch, search, first"):
        LayoutMap(mesh, match="full")
    with pytest.raises(ValueError, match=r"LayoutMap needs a DeviceMesh, got \(2, 4\) \(tuple\)"):
        LayoutMap((2, 4))
