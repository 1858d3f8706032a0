"""Which dims a model splits itself."""

from dataclasses import replace

from spmdkit.parallel.sharding.default_layout import model_axes
from support import toy


def test_a_rule_of_the_model_is_for_whole_paths():
    model = replace(toy.BLOCK_MODEL, rules={"blocks/(up|gate)": (None, None, "tensor"), "head/out": (None, "tensor")})
    assert model_axes(model, "blocks/up") == (None, None, "tensor")
    for path in ("blocks/up_bias", "other/blocks/up", "embed/table"):
        assert model_axes(model, path) == ()
    assert model_axes(toy.PLAIN_MODEL, "blocks/up") == ()
