"""From a strategy to layouts: what FSDP splits, what rules override, and every mistake said at once."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from spmdkit.models.transformer import TransformerConfig, transformer
from spmdkit.parallel import BlockModel, FSDPConfig, Model, Precision, lay_out
from spmdkit.parallel.sharding.default_layout import model_axes
from spmdkit.parallel.sharding.lay_out import abstract_parameters
from support import toy

from spmdkit import DataParallel, DeviceMesh, LayoutError, LayoutMap, ModelParallel


def rows(strategy, model=toy.BLOCK_MODEL, **options):
    return {row.path: row for row in lay_out(model, strategy, **options).table.rows}


def model_of(**shapes):
    return Model(
        init=lambda key: {name: jnp.zeros(shape) for name, shape in shapes.items()}, loss=lambda p, b, k: (0, 0)
    )


def test_fsdp_splits_the_first_dim_it_divides_and_never_the_blocks():
    table = rows({"fsdp": FSDPConfig(size=4, floor_bytes=1024), "data": 2})
    assert table["blocks/up"].layout.axes == (None, "fsdp", None)
    assert table["blocks/up"].rule == "fsdp: dim 1"
    assert table["blocks/up"].bytes_per_device == 3 * 16 * 64 * 4 // 4
    assert table["embed/table"].layout.axes == ("fsdp", None)


def test_the_floor_counts_one_block_and_shows():
    table = rows({"fsdp": FSDPConfig(size=8, floor_bytes=64 * 16 * 4)})
    assert table["blocks/scale"].rule == "fsdp: whole, under the floor of 4,096 B"
    assert table["blocks/up"].layout.used_axes == ("fsdp",)
    assert table["embed/table"].layout.used_axes == ()


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((6, 16), (None, "fsdp")),
        ((16, 6), ("fsdp", None)),
        ((8, 8), ("fsdp", None)),
        ((3, 5, 24), (None, None, "fsdp")),
    ],
)
def test_which_dim(shape, axes):
    table = rows({"fsdp": FSDPConfig(size=8, floor_bytes=0)}, model=model_of(w=shape))
    assert table["w"].layout.axes == axes


def test_drops_a_floor_that_no_parameter_reaches():
    layouts = lay_out(toy.BLOCK_MODEL, {"fsdp": FSDPConfig(size=8, floor_bytes=1 << 20)})
    assert layouts.table.row("blocks/up").layout.axes == (None, "fsdp", None)
    (note,) = layouts.table.notes
    assert note == "No parameter that fsdp 8 can split reaches strategy.fsdp.floor_bytes=1,048,576: no floor is used."
    assert str(layouts).endswith(note)


def test_keeps_the_floor_if_a_rule_uses_the_axis():
    strategy = {"fsdp": FSDPConfig(size=8, floor_bytes=1 << 20)}
    layouts = lay_out(toy.BLOCK_MODEL, strategy, rules={"blocks/up": [None, None, "fsdp"]})
    assert [row.path for row in layouts.table.rows if row.layout.used_axes] == ["blocks/up"]
    assert layouts.table.notes == ()


def test_leaves_parameters_whole_that_fsdp_cannot_split():
    model, strategy = model_of(odd=(7, 9), even=(128, 128)), {"fsdp": FSDPConfig(size=8, floor_bytes=0)}
    table = lay_out(model, strategy).table  # 252 of 65,788 bytes: no warning
    assert table.row("even").layout.axes == ("fsdp", None)
    assert table.row("odd").layout.used_axes == ()
    assert table.row("odd").rule == "fsdp: whole, 8 divides no dim"
    assert table.notes == ("1 array of 252 B whole on every device, as fsdp 8 divides no dim: odd",)
    assert table.bytes_per_device == 252 + 128 * 128 * 4 // 8


@pytest.mark.parametrize("shapes", [{"odd": (65, 65), "even": (64, 64)}, {"odd": (7, 9)}, {"odd": (), "even": (8,)}])
def test_warns_if_fsdp_cannot_split_over_a_hundredth(shapes):
    model, strategy = model_of(**shapes), {"fsdp": FSDPConfig(size=8)}
    with pytest.warns(UserWarning, match=r"fsdp 8 divides no dim: odd\. They are .*% of the state\. .*=replicate"):
        layouts = lay_out(model, strategy)
    assert layouts.table.row("odd").layout.used_axes == ()
    assert lay_out(model, strategy, indivisible="replicate").table == layouts.table


def test_rejects_a_rule_that_does_not_divide_beside_parameters_that_stay_whole():
    with pytest.raises(LayoutError, match=r"'odd' .* from rule 'odd'.*7 % 8"):
        lay_out(model_of(odd=(7, 9), other=(9, 7)), {"fsdp": 8}, rules={"odd": ["fsdp", None]})


def test_rejects_rules_that_leave_fsdp_nothing():
    with pytest.raises(LayoutError, match=r"'fsdp' of size 8 splits no parameter.*or set strategy.fsdp to 1"):
        lay_out(model_of(w=(8, 8)), {"fsdp": 8}, rules={"w": [None, None]})


@pytest.mark.parametrize("strategy", [{"tensor": {"size": 4, "explicit": False}}, {"fsdp": 4}])
def test_next_dim_never_takes_the_dim_that_counts_blocks(strategy):
    """8 blocks, the largest dim and the only one that 4 divides, of w; in v another one is divisible."""
    (axis,) = strategy
    leaves = {"w": jnp.zeros((8, 6, 7)), "v": jnp.zeros((8, 4, 7))}
    model = BlockModel(
        init=lambda key: {"embed": {}, "blocks": dict(leaves), "head": {}},
        embed=lambda groups, batch, key: batch["x"],
        block=lambda params, x, key: x,
        head=lambda groups, x, batch, key: (x.sum(), 1.0),
        num_blocks=8,
    )
    rules = {"blocks/.*": (None, None, axis)}
    with pytest.raises(LayoutError, match=r"'blocks/w' .* dim 2 of size 7 does not divide over") as raised:
        lay_out(model, strategy, rules=rules, indivisible="next_dim", devices=toy.devices(4))
    assert len(raised.value.problems) == 1
    del leaves["w"]
    table = rows(strategy, model=model, rules=rules, indivisible="next_dim", devices=toy.devices(4))
    assert table["blocks/v"].layout.axes == (None, axis, None)


def test_rules_win_over_the_strategy():
    table = rows(
        {"fsdp": FSDPConfig(size=8, floor_bytes=0)}, rules={"blocks/up": [None, None, "fsdp"], "head/.*": [None, None]}
    )
    assert table["blocks/up"].layout.axes == (None, None, "fsdp")
    assert table["blocks/up"].rule == "blocks/up"
    assert table["head/out"].layout.used_axes == ()
    assert rows({"fsdp": 8}, rules={"up": [None, None, "fsdp"]}, match="search")["blocks/up"].rule == "up"


def test_a_rule_cannot_split_the_blocks_over_the_batch():
    with pytest.raises(ValueError, match=r"Dim 0 of the leaves under blocks.*null for dim 0"):
        lay_out(
            toy.BLOCK_MODEL,
            {"fsdp": FSDPConfig(size=3, floor_bytes=0)},
            rules={"blocks/scale": ["fsdp", None]},
            devices=toy.devices(3),
            indivisible="replicate",
        )


def test_foreign_axes_need_a_distribution():
    mesh = DeviceMesh((8,), ("rows",))
    with pytest.raises(ValueError, match=r"\['rows'\] that do not belong to any strategy.*ModelParallel"):
        lay_out(toy.BLOCK_MODEL, mesh)
    assert lay_out(toy.BLOCK_MODEL, DataParallel(device_mesh=mesh)).batch_axes == ("rows",)


def test_rules_given_twice():
    layout_map = LayoutMap(DeviceMesh((2, 4), ("batch", "model")))
    layout_map["head/out"] = (None, "model")
    with pytest.raises(ValueError, match="given twice"):
        lay_out(toy.BLOCK_MODEL, ModelParallel(layout_map=layout_map), rules={"head/out": [None, None]})


def test_stored_dtype_decides_the_bytes():
    narrow = rows({"fsdp": FSDPConfig(size=8, floor_bytes=0)}, precision=Precision(params="bfloat16"))
    assert narrow["blocks/up"].bytes_per_device == 3 * 16 * 64 * 2 // 8
    params = abstract_parameters(toy.BLOCK_MODEL, Precision(params="bfloat16"))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}


MODEL = transformer(TransformerConfig(vocabulary=32, length=16, layers=4, width=16, heads=4, kv_heads=2, mlp_width=32))


def test_a_mesh_may_name_the_axes_inside_a_model():
    for axis in ("pipe", "context", "tensor"):
        by_mesh = lay_out(MODEL, DeviceMesh.of(toy.devices(2), **{axis: 2}))
        assert by_mesh.manual_axes == (axis,)
        assert by_mesh.table == lay_out(MODEL, {axis: 2}, devices=toy.devices(2)).table


def test_a_rule_of_the_model_is_for_whole_paths():
    model = replace(toy.BLOCK_MODEL, rules={"blocks/(up|gate)": (None, None, "tensor"), "head/out": (None, "tensor")})
    assert model_axes(model, "blocks/up") == (None, None, "tensor")
    for path in ("blocks/up_bias", "other/blocks/up", "embed/table"):
        assert model_axes(model, path) == ()
    assert model_axes(toy.PLAIN_MODEL, "blocks/up") == ()
