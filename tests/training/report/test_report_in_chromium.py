"""The report as Chromium lays it out, at the width of a laptop and of a phone; skipped where there is no Chromium."""

import json
import re
import shutil
import subprocess
from html import escape, unescape

import jax
import jax.numpy as jnp
import pytest
from report_page import COLLECTIVES, COSTS, METRICS, SUMMARY
from spmdkit.launch.drawing.schedule_svg import draw_svg
from spmdkit.layouts.resolve import resolve
from spmdkit.layouts.tensor_layout import TensorLayout
from spmdkit.mesh.device_mesh import DeviceMesh
from spmdkit.parallel.schedule.builders import make_schedule
from spmdkit.training.goodput import KINDS, Goodput
from spmdkit.training.report.report import write_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
WIDTHS = (1280, 390)
MEASURE = """
const reach = (frame) => {
  const page = frame.contentDocument, width = page.documentElement.clientWidth, beyond = [];
  for (const element of page.querySelectorAll('body *')) {
    let scrolls = false;
    for (let box = element.parentElement; box; box = box.parentElement)
      scrolls ||= frame.contentWindow.getComputedStyle(box).overflowX === 'auto';
    const place = element.getBoundingClientRect();
    if (!scrolls && place.width && place.right > width + 1)
      beyond.push(element.tagName + '.' + element.className);
  }
  const boxes = [...page.querySelectorAll('.tile')].map(tile => tile.getBoundingClientRect());
  const outside = [...page.querySelectorAll('.plot span:not(.tip)')].filter(label =>
    label.getBoundingClientRect().left < label.closest('.card').getBoundingClientRect().left + 4);
  const wide = box => box.scrollWidth > box.clientWidth + 1;
  const picture = page.querySelector('.schedule')?.shadowRoot?.querySelector('svg');
  page.querySelector('.layouts th:last-child button').click();
  const sorted = [...page.querySelectorAll('.layouts tbody td.number')].map(cell => Number(cell.dataset.sort));
  return {
    sorted, outside: outside.map(label => label.textContent),
    width, across: page.documentElement.scrollWidth, beyond: beyond.slice(0, 5),
    tallest: Math.max(...boxes.map(box => box.height)),
    right: Math.max(...boxes.map(box => box.right)) - Math.max(...boxes.filter(
      box => box.bottom === Math.max(...boxes.map(other => other.bottom))).map(box => box.right)),
    scrolling: [...page.querySelectorAll('.scroll, .schedule')].filter(wide).map(box => box.className),
    pictured: picture?.getBoundingClientRect().height ?? 0,
    loads: performance.getEntriesByType('resource').length +
      frame.contentWindow.performance.getEntriesByType('resource').length,
  };
};
addEventListener('load', () => {
  const found = [...document.querySelectorAll('iframe')].map(reach);
  document.getElementById('found').textContent = JSON.stringify(found);
});
"""


@pytest.fixture(scope="module")
def laid_out(tmp_path_factory):
    """What Chromium measures of a report that has everything, by the width of the page."""
    if CHROMIUM is None:
        pytest.skip("no Chromium on PATH: install the package chromium, or google-chrome")
    folder = tmp_path_factory.mktemp("chromium")
    mesh = DeviceMesh.simulated(8, data=2, fsdp=2, tensor=2)
    names = ["blocks/attention/query", "a_module_of_a_long_name/" * 6 + "kernel", "embed"]
    shapes = {name: jax.ShapeDtypeStruct((128, 384, 64 * size), jnp.float32) for size, name in enumerate(names, 1)}
    rules = iter(["fsdp: dim 0; tensor: dim 1", "fsdp: whole, under the floor of 16,384 B", "data: whole"])
    table = resolve(
        shapes, mesh, default=lambda path, leaf: (TensorLayout((("data", "fsdp"), "tensor", None), mesh), next(rules))
    )
    costs = COSTS._replace(
        found=COLLECTIVES[:2],
        notes=("On simulated devices this program is not the one that GPUs run.",),
        schedule_svg=draw_svg(make_schedule("1f1b", 4, 8)),
    )
    summary = SUMMARY | {"title": "runs/" + "of_a_long_name" * 5}
    write_report(
        folder / "report.html",
        config={"run": {"dir": "runs/" + "of_a_long_name" * 5}},
        metrics=METRICS,
        table=table,
        mesh=mesh,
        summary=summary,
        sample="def sample():\n" + "    return" + " and more" * 40,
        costs=costs,
        goodput=Goodput({kind: 1.5**number for number, kind in enumerate(KINDS)}, starts=12, lost_steps=123_456),
    )
    page = escape((folder / "report.html").read_text(encoding="utf-8"))
    frames = "".join(f'<iframe width="{width}" height="900" srcdoc="{page}"></iframe>' for width in WIDTHS)
    outer = folder / "outer.html"
    outer.write_text(
        "<!doctype html><meta charset=utf-8><style>iframe {border: 0}</style>"
        f'<pre id="found"></pre>{frames}<script>{MEASURE}</script>',
        encoding="utf-8",
    )
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"]
    quiet = [
        "--disable-sync",
        "--disable-background-networking",
        "--disable-component-update",
        f"--user-data-dir={folder / 'profile'}",
    ]
    ended = subprocess.run(
        [CHROMIUM, *options, *quiet, "--window-size=1400,2000", "--dump-dom", outer.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    found = re.search(r'<pre id="found">(.+?)</pre>', ended.stdout, re.DOTALL)
    assert found, ended.stderr[-2000:]
    return dict(zip(WIDTHS, json.loads(unescape(found[1])), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_fits_its_reader(laid_out, width):
    """Nothing sticks out of the page; what is wider scrolls in a box of its own, and only the schedule is."""
    measured = laid_out[width]
    assert measured["width"] == measured["across"] == width
    assert measured["beyond"] == measured["outside"] == []
    assert set(measured["scrolling"]) <= {"schedule"}
    assert measured["pictured"] > 200
    assert measured["loads"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
def test_tiles_fit_their_content(laid_out, width):
    assert laid_out[width]["tallest"] < 130
    assert laid_out[width]["right"] < 1, "the last row of tiles is as wide as the others"


@pytest.mark.slow
def test_a_heading_sorts_its_column(laid_out):
    sizes = laid_out[WIDTHS[0]]["sorted"]
    assert len(set(sizes)) == 3
    assert sizes == sorted(sizes, reverse=True)
