"""The layout table: trees, totals, text, plain data."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from spmdkit.layouts import LayoutMap, LayoutTable, TensorLayout, resolve
from spmdkit.layouts.sizes import RowSplit, array_bytes, format_bytes
from spmdkit.layouts.table import MAX_ROWS, MAX_WIDTH, stacks_of
from spmdkit.mesh import DeviceMesh

TEXT = """\
path                 shape   dtype     rule                              layout        per device
blocks/{0..11}/norm  64      float32   replicated: no rule, under 1 MiB  (None,)            3 KiB
blocks/{0..11}/q     64x64   float32   .*/q                              (None, fsdp)      48 KiB
embed                100x64  bfloat16  embed                             (fsdp, None)     3.1 KiB
scale                scalar  float32   replicated: no rule, under 1 MiB  ()                   4 B
26 arrays, 56,321 elements, 207.5 KiB in total, 54.1 KiB per device (8 devices)"""


def make_table(mesh: DeviceMesh) -> LayoutTable:
    params = {
        "embed": jax.ShapeDtypeStruct((100, 64), jnp.bfloat16),
        "blocks": [{"q": jax.ShapeDtypeStruct((64, 64), "float32"), "norm": np.ones(64, "float32")} for _ in range(12)],
        "scale": jax.ShapeDtypeStruct((), "float32"),
    }
    rules = LayoutMap(mesh)
    rules["embed"], rules[".*/q"] = ("fsdp", None), (None, "fsdp")
    return resolve(params, mesh, rules=rules)


def test_text(canonical):
    assert str(make_table(canonical)) == repr(make_table(canonical)) == TEXT


def test_numbered_parameters_of_different_layouts_have_their_own_lines(canonical):
    rows = [row for row in make_table(canonical).rows if row.path in ("blocks/0/q", "blocks/1/q")]
    assert len(stacks_of(rows)) == 1
    assert len(stacks_of([rows[0], replace(rows[1], layout=TensorLayout((None, None), canonical))])) == 2


def test_trees(canonical):
    table = make_table(canonical)
    assert table.layouts["embed"].spec == PartitionSpec("fsdp")
    assert table.layouts["blocks"][3]["q"].axes == (None, "fsdp")
    assert table.shardings()["blocks"][0]["q"] == NamedSharding(canonical.backend_mesh, PartitionSpec(None, "fsdp"))
    assert table.shardings(abstract=True)["embed"].mesh == canonical.abstract_mesh
    assert table.abstract_arrays["embed"] == jax.ShapeDtypeStruct((100, 64), jnp.bfloat16)


def test_rows(canonical):
    table = make_table(canonical)
    assert table.row("blocks/7/q").shape == (64, 64)
    with pytest.raises(ValueError, match=r"Unknown path 'blocks/7/k'.*Did you mean 'blocks/7/q'"):
        table.row("blocks/7/k")
    row = {"path": "embed", "shape": [100, 64], "dtype": "bfloat16", "rule": "embed", "layout": [["fsdp"], []]}
    assert json.loads(json.dumps(table.to_json()))[-2] == {**row, "bytes_per_device": 3200, "bytes": 12800}


def test_an_empty_tree(canonical):
    table = resolve({"a": {}, "b": None}, canonical)
    assert (table.layouts, table.bytes_per_device) == ({"a": {}, "b": None}, 0)
    assert str(table).endswith("0 arrays, 0 elements, 0 B in total, 0 B per device (8 devices)")


def test_a_mesh_elsewhere_has_a_table():
    mesh = DeviceMesh.of([f"cuda:{number}" for number in range(1024)], data=128, fsdp=8)
    rules = LayoutMap(mesh)
    rules["w"] = ("fsdp", None)
    table = resolve({"w": jax.ShapeDtypeStruct((1 << 20, 4096), "float32")}, mesh, rules=rules)
    assert "\n1 array, 4,294,967,296 elements, 16 GiB in total, 2 GiB per device (1,024 devices)" in str(table)
    assert table.shardings(abstract=True)["w"].shard_shape((1 << 20, 4096)) == (1 << 17, 4096)
    with pytest.raises(ValueError, match="not on this machine"):
        table.shardings()


def long_table(mesh: DeviceMesh, names: list[str]) -> LayoutTable:
    """Vectors of 1 KiB, 2 KiB, 3 KiB, ..., whole on every device."""
    leaves = {name: jax.ShapeDtypeStruct((256 * place,), "float32") for place, name in enumerate(names, 1)}
    return resolve(leaves, mesh)


def test_a_large_table_prints_its_largest_lines(canonical):
    table = long_table(canonical, [f"w{chr(97 + place // 26)}{chr(97 + place % 26)}" for place in range(100)])
    lines = str(table).splitlines()
    assert len(lines) == 1 + MAX_ROWS + 2
    assert [line.split()[0] for line in (lines[1], lines[MAX_ROWS])] == ["wci", "wdv"], "the largest, in their order"
    assert lines[-2].startswith("... 60 smaller lines of 100 are omitted: 1.8 MiB per device")
    assert lines[-1].startswith("100 arrays, 1,292,800 elements, 4.9 MiB in total, ")
    assert len(table.text().splitlines()) == 102


def test_a_long_cell_loses_its_middle(canonical):
    path = "a" * 300 + "/kernel"
    table = long_table(canonical, [path])
    assert all(len(line) < 250 for line in str(table).splitlines())
    assert "aaaa…aaaa" in str(table)
    assert len(str(table).splitlines()[1].split()[0]) == MAX_WIDTH
    assert "/kernel " in str(table)
    assert path in table.text()


HOSTILE = '\x1b[2J<script>alert("1")</script>\n\t\u202e&'


def test_escapes_hostile_names(canonical):
    table = long_table(canonical, [HOSTILE, "w"])
    for text in (str(table), table.text()):
        assert all(character.isprintable() or character == "\n" for character in text)
        assert len(text.splitlines()) == 4
        assert r"\x1b[2J" in text
        assert r"\n\t\u202e&" in text


def test_counts_bytes():
    assert array_bytes((3, 4), np.dtype("float32")) == 48
    assert array_bytes((), jax.numpy.dtype("bfloat16")) == 2
    assert array_bytes((2,), jax.random.key(0).dtype) == 16


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        *[(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), ((1 << 20) - 1, "1 MiB"), (1 << 20, "1 MiB")],
        *[((1 << 30) - (1 << 20), "1023 MiB"), (5 << 30, "5 GiB"), (3 << 50, "3 PiB"), (1 << 70, "1024 EiB")],
    ],
)
def test_formats_bytes(num_bytes, text):
    assert format_bytes(num_bytes) == text


def test_finds_row_counts_that_fit():
    split = RowSplit({"data": 2, "accumulate": 3})
    assert split.total == 6
    assert [rows for rows in range(-6, 20) if split.fits(rows)] == [6, 12, 18]
    assert (split.nearest(16), split.nearest(1)) == (18, 6)
    assert (str(split), str(RowSplit({}))) == ("data 2 x accumulate 3", "1 device")
