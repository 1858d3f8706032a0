"""Drawings: every device is drawn with the part that JAX puts there."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spmdkit.layouts.table import make_row
from spmdkit.layouts.tensor_layout import TensorLayout
from spmdkit.mesh.device_mesh import DeviceMesh
from spmdkit.report.drawings import draw_array, draw_devices, parts_of_devices
from spmdkit.report.templates import ENVIRONMENT

LAYOUTS = [
    ((), ()),
    ((None, "fsdp"), (4, 8)),
    (("fsdp", None), (8, 4)),
    (("data", "fsdp"), (8, 8)),
    ((("data", "fsdp"), None), (16, 3)),
    ((None, ("fsdp", "data")), (3, 16)),  # the other order
    ((None, "tensor", "fsdp"), (2, 8, 8)),
]


@pytest.fixture
def mesh():
    return DeviceMesh.simulated(8, data=2, fsdp=2, tensor=2)


@pytest.mark.parametrize(("axes", "shape"), LAYOUTS)
def test_parts_match_jax(mesh, axes, shape):
    layout = TensorLayout(axes, mesh)
    parts = parts_of_devices(layout, len(shape))
    held = layout.backend_layout.devices_indices_map(shape)
    for place in np.ndindex(mesh.shape):
        starts = [cut.start or 0 for cut in held[mesh.backend_mesh.devices[place]]]
        assert list(parts[place] * np.array(layout.shard_shape(shape), int)) == starts


def row(mesh, axes, shape, path="w"):
    return make_row(path, jax.ShapeDtypeStruct(shape, jnp.dtype("float32")), "a rule", TensorLayout(axes, mesh))


def render(macro, drawing):
    return getattr(ENVIRONMENT.get_template("parts.html").module, macro)(drawing)


def held_parts(drawing):
    cells = [cell for grid in drawing["mesh"]["grids"] if grid for _, row in grid["rows"] for cell in row if cell]
    return dict(cell.title.split(" holds ") for cell in cells)


def test_array_is_drawn_with_its_parts_beside_the_mesh():
    mesh = DeviceMesh.simulated(8, data=2, fsdp=4)
    drawn = draw_array(row(mesh, (None, "fsdp"), (16, 8)))
    assert held_parts(drawn) == {f"cpu:{i}": f"part {'ABCD'[i % 4]}" for i in range(8)}
    assert drawn["text"] == "16 × 8 float32 in 4 parts, each 16 × 2, 128 B, 2 copies"
    assert drawn["dims"] == ["16", "8 = 4 × 2 over fsdp"]
    width = drawn["pieces"][0]["width"]
    assert [(piece["x"], piece["y"]) for piece in drawn["pieces"]] == [(width * place, 0) for place in range(4)]
    html = render("array", drawn)
    colors = re.findall(r'<rect class="part" style="--h:([\d.]+)"', html)
    assert len(set(colors)) == html.count("<rect") == 4
    assert len(draw_array(row(mesh, (None, None, "fsdp"), (64, 32, 4)))["pieces"]) == 4, "the split dim is drawn"
    assert re.findall(r'class="device part" style="--h:([\d.]+)"', html) == colors * 2, "each part has one color"


def test_whole_array_is_one_part_everywhere(mesh):
    drawn = draw_array(row(mesh, (None, None), (4, 4)))
    assert set(held_parts(drawn).values()) == {"all of it"}
    assert len(drawn["pieces"]) == 1
    assert drawn["text"] == "4 × 4 float32, whole on every device: 64 B"


@pytest.mark.parametrize("shape", [(), (7,), (1, 1000), (2, 3, 4, 5)])
def test_draws_every_shape(mesh, shape):
    assert render("array", draw_array(row(mesh, (None,) * len(shape), shape))).count("<rect") == 1


def test_mesh_shows_every_device_in_its_place():
    drawn = draw_devices(DeviceMesh.simulated(8, data=2, fsdp=4))
    assert drawn["text"] == "data 2 × fsdp 4: 8 devices, cpu:0 to cpu:7"
    html = render("mesh", drawn["mesh"])
    assert re.findall(r'title="(cpu:\d)"', html) == [f"cpu:{i}" for i in range(8)]
    assert [line.count('class="device"') for line in html.split("<tr>")[-2:]] == [4, 4]


def test_three_axes_are_grids_side_by_side(mesh):
    html = render("mesh", draw_devices(mesh)["mesh"])
    assert html.count('<table class="devices">') == html.count("<caption>") == 2


def test_a_thousand_devices_stay_a_small_drawing():
    mesh = DeviceMesh.of([f"cuda:{i}" for i in range(1024)], data=32, fsdp=32)
    assert len(render("mesh", draw_devices(mesh)["mesh"])) < 20_000
    drawn = draw_array(row(mesh, ("data", "fsdp"), (4096, 4096)))
    assert len(render("array", drawn)) < 20_000
    assert drawn["num_parts"] == 1024
    assert held_parts(drawn)["cuda:1023"] == "part 1023"


def test_names_never_become_markup():
    mesh = DeviceMesh((2,), ("<b>",), ["cpu:0", "cpu:1"])
    drawn = draw_array(row(mesh, ("<b>",), (4,), path="<b>/w"))
    assert "<b>" not in render("array", drawn) + render("mesh", draw_devices(mesh)["mesh"])
