"""Keras's LayoutMap, by its attributes alone."""

from types import SimpleNamespace

import numpy as np
import pytest
from spmdkit.layouts import from_keras
from spmdkit.mesh import DeviceMesh

import spmdkit


class KerasMap:
    """What Keras's has: items(), and a mesh of devices by name."""

    def __init__(self, rules, mesh):
        self.rules, self.device_mesh = rules, mesh

    def items(self):
        return self.rules.items()


def layout(*axes):
    return SimpleNamespace(axes=axes, device_mesh=None)


MESH = SimpleNamespace(
    shape=(4, 2), axis_names=["batch", "model"], devices=np.array([f"cpu:{n}" for n in range(8)]).reshape(4, 2)
)
RULES = {
    ".*dense.*kernel": layout(None, "model"),
    ".*dense.*bias": layout("model"),
    "sequential/dense_1/kernel": layout("batch", "model"),
    ".*dense/output": layout("batch", None),
}


def test_keys_layouts_and_mesh_are_kept():
    rules = from_keras(KerasMap(RULES, MESH))
    assert list(rules) == list(RULES)
    assert rules.device_mesh == DeviceMesh((4, 2), ("batch", "model"))
    assert rules["sequential/dense/kernel"].axes == (None, "model")
    assert rules["sequential/dense_1/kernel"].axes == ("batch", "model")  # the path itself wins
    assert rules["sequential/dense/bias"].shard_shape((16,)) == (8,)
    assert rules["conv/kernel"] is None


def test_on_another_mesh():
    mesh = DeviceMesh.of(data=2, tensor=4)
    rules = from_keras(KerasMap(RULES, MESH), mesh, axes={"batch": "data", "model": "tensor"})
    assert rules["a/dense/kernel"].axes == (None, "tensor")
    assert rules["a/dense/output"].axes == ("data", None)


def test_rules_for_an_older_keras_are_searched_for():
    rules = from_keras(KerasMap({"dense": layout("model")}, MESH), match="search")
    assert rules["sequential/dense/bias"].axes == ("model",)


def test_our_own_map_passes(mesh):
    own = spmdkit.LayoutMap(mesh)
    own["a"] = ("model",)
    assert dict(from_keras(own).items()) == dict(own.items())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([("a", ("model",))], r"from_keras got .*\(list\); it takes a keras.distribution.LayoutMap"),
        (KerasMap({"a": 3}, MESH), "rule 'a' gives None"),
        (KerasMap({"(": layout("model")}, MESH), "not a valid regular expression"),
        (KerasMap({}, None), "the device_mesh of the map is None"),
        (KerasMap({"a": layout("modle")}, MESH), r"axes=\{'modle': 'model'\}"),
    ],
)
def test_mistakes(given, message):
    with pytest.raises(spmdkit.UserError, match=message):
        from_keras(given)
