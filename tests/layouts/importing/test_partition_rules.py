"""Lists of (regular expression, PartitionSpec): the first that is found anywhere in a path."""

import jax
import pytest
from jax.sharding import PartitionSpec as P
from spmdkit.layouts import from_partition_rules, resolve
from spmdkit.mesh import DeviceMesh

import spmdkit

SHAPES = {
    "transformer": {
        "wte": {"embedding": (64, 16)},
        "h": {
            "0": {"attention": {"wq": {"kernel": (16, 16)}, "wo": {"kernel": (16, 16)}}, "norm": {"kernel": (16,)}},
            "1": {"attention": {"wq": {"kernel": (16, 16)}, "wo": {"kernel": (16, 16)}}, "norm": {"kernel": (16,)}},
        },
        "temperature": (1,),
    },
    "lm_head": {"kernel": (16, 64)},
}
PARAMS = jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, "float32"), SHAPES, is_leaf=lambda x: type(x) is tuple)
RULES = (
    ("transformer/wte/embedding", P("mp", "fsdp")),
    ("attention/(wq|wk|wv)/kernel", P("fsdp", "mp")),
    ("attention/wo/kernel", P("mp", "fsdp")),
    ("norm/kernel", P(None)),
    ("lm_head/kernel", P("fsdp")),
    ("temperature", P("fsdp", "mp")),
    (".*", P(None)),
)


@pytest.fixture
def own():
    return DeviceMesh.of(fsdp=2, tensor=4)


def test_a_tree_is_laid_out(own):
    rules = from_partition_rules(RULES, PARAMS, own, axes={"mp": "tensor"})
    table = resolve(PARAMS, own, rules=rules)
    found = {row.path: row.layout.axes for row in table.rows}
    assert found["transformer/wte/embedding"] == ("tensor", "fsdp")
    assert found["transformer/h/1/attention/wq/kernel"] == ("fsdp", "tensor")
    assert found["transformer/h/0/attention/wo/kernel"] == ("tensor", "fsdp")
    assert found["transformer/h/0/norm/kernel"] == (None,)
    assert found["lm_head/kernel"] == ("fsdp", None)  # the spec is shorter than the array
    assert found["transformer/temperature"] == (None,)  # one element is never split
    assert table.row("lm_head/kernel").bytes_per_device == 16 * 64 * 4 // 2


def test_what_no_expression_is_found_in_is_left_to_the_strategy(own):
    rules = from_partition_rules([("attention", P("fsdp", "tensor"))], PARAMS, own)
    assert len(rules) == 4
    assert rules["lm_head/kernel"] is None


def test_expressions_that_are_found_nowhere(own):
    rules = [*RULES, ("mlp/kernel", P("mp"))]
    with pytest.raises(spmdkit.UserError, match=r"Rule 'mlp/kernel' matches no parameter.*unused='ignore'"):
        from_partition_rules(rules, PARAMS, own, axes={"mp": "tensor"})
    assert len(from_partition_rules(rules, PARAMS, own, axes={"mp": "tensor"}, unused="ignore")) == 9


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([("norm", P("fsdp", "tensor"))], r"2 entries, to 'transformer/h/0/norm/kernel', which has the shape \(16,\)"),
        ([("(norm", P())], "not a valid regular expression"),
        ([("norm", "fsdp")], r"a layout is a PartitionSpec or a tuple"),
        ([("norm", P("mp"))], r"the mesh has pipe, data, .* axes=\{'mp': "),
        ([(3, P())], r"rule 0 is \(3, P.*; each rule is a pair"),
    ],
)
def test_mistakes(own, rules, message):
    with pytest.raises(spmdkit.UserError, match=message):
        from_partition_rules(rules, PARAMS, own)


def test_an_unknown_way_with_idle_rules(own):
    with pytest.raises(spmdkit.UserError, match="unused='warn'"):
        from_partition_rules(RULES, PARAMS, own, unused="warn")
