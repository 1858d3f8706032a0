"""Drawings: the part that a device is drawn with is the part that JAX puts there."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spmdkit.layouts.table import make_row
from spmdkit.layouts.tensor_layout import TensorLayout
from spmdkit.mesh.device_mesh import DeviceMesh
from spmdkit.training.report.drawings import draw_array, draw_devices, parts_of_devices

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
def test_parts_are_those_of_jax(mesh, axes, shape):
    layout = TensorLayout(axes, mesh)
    parts = parts_of_devices(layout, len(shape))
    held = layout.backend_layout.devices_indices_map(shape)
    for place in np.ndindex(mesh.shape):
        starts = [cut.start or 0 for cut in held[mesh.backend_mesh.devices[place]]]
        assert list(parts[place] * np.array(layout.shard_shape(shape), int)) == starts


def row(mesh, axes, shape, path="w"):
    return make_row(path, jax.ShapeDtypeStruct(shape, jnp.dtype("float32")), "a rule", TensorLayout(axes, mesh))


def titles(html: str) -> dict[str, str]:
    return dict(re.findall(r'title="(\S+) holds ([^"]*)"', html))


def test_an_array_is_drawn_with_its_parts_beside_the_mesh():
    mesh = DeviceMesh.simulated(8, data=2, fsdp=4)
    html = draw_array(row(mesh, (None, "fsdp"), (16, 8)))
    assert titles(html) == {f"cpu:{i}": f"part {'ABCD'[i % 4]}" for i in range(8)}
    assert html.count("<rect") == 4
    assert "16 × 8 float32 in 4 parts, each 16 × 2, 128 B, 2 copies" in html
    assert "<li>16</li><li>8 = 4 × 2 over fsdp</li>" in html
    colors = re.findall(r'<rect class="part" style="--h:([\d.]+)"', html)
    assert len(set(colors)) == 4
    assert re.findall(r'class="device part" style="--h:([\d.]+)"', html) == colors * 2, "each part has one color"


def test_a_whole_array_is_one_part_everywhere(mesh):
    html = draw_array(row(mesh, (None, None), (4, 4)))
    assert set(titles(html).values()) == {"all of it"}
    assert html.count("<rect") == 1
    assert "on every device whole: 64 B" in html


@pytest.mark.parametrize("shape", [(), (7,), (1, 1000), (1000, 1), (2, 3, 4, 5)])
def test_every_shape_can_be_drawn(mesh, shape):
    assert draw_array(row(mesh, (None,) * len(shape), shape)).count("<rect") == 1


def test_the_mesh_shows_every_device_in_its_place():
    html = draw_devices(DeviceMesh.simulated(8, data=2, fsdp=4))
    assert re.findall(r'title="(cpu:\d)"', html) == [f"cpu:{i}" for i in range(8)]
    assert "data 2 × fsdp 4: 8 devices, cpu:0 to cpu:7" in html
    lines = html.split("<tr>")
    assert [line.count('class="device"') for line in lines[-2:]] == [4, 4]


def test_three_axes_are_grids_side_by_side(mesh):
    html = draw_devices(mesh)
    assert html.count('<table class="devices">') == 2
    assert html.count("<caption>") == 2


def test_a_thousand_devices_stay_a_small_drawing():
    mesh = DeviceMesh.of([f"cuda:{i}" for i in range(1024)], data=32, fsdp=32)
    assert len(draw_devices(mesh)) < 20_000
    html = draw_array(row(mesh, ("data", "fsdp"), (4096, 4096)))
    assert len(html) < 20_000
    assert "1024 parts" in html
    assert titles(html)["cuda:1023"] == "part 1023"


def test_names_cannot_leave_the_page():
    mesh = DeviceMesh((2,), ("<b>",), ["cpu:0", "cpu:1"])
    assert "<b>" not in draw_array(row(mesh, ("<b>",), (4,), path="<b>/w")) + draw_devices(mesh)
