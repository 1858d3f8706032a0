"""The layout table of the report: layers together, shapes with their axes, sums, and a bound for large models."""

from report_page import Page, table_on
from spmdkit.mesh.device_mesh import DeviceMesh
from spmdkit.training.report.layouts import layouts_section


def test_the_table_groups_layers_and_adds_up():
    html = layouts_section(table_on(DeviceMesh.simulated(8, data=2, fsdp=4)))
    page = Page(html)
    assert "blocks/{0..2}/kernel" in page.text("path")
    assert "3 × 16" not in page.text("shape")
    assert "16 fsdp ÷4 × 8" in page.text("shape")
    assert "1/4 of 768 B" in page.text("number")
    assert "small <16 KiB>" in page.text("rule")
    assert "5 arrays, 2,464 elements, 8.9 KiB" in page.text("td")
    assert html.count("<tr>") == 1 + 3 + 1
    assert "card scroll long" not in html


def test_a_large_table_is_bounded_and_scrolls_in_its_box():
    html = layouts_section(table_on(DeviceMesh.simulated(8, data=2, fsdp=4), num_weights=1500))
    assert "1,504 arrays" in html
    assert "(1,202 smaller rows not shown)" in html
    assert html.count("<tr>") == 1 + 300 + 1
    assert '"card scroll long"' in html
