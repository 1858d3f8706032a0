"""The layout of the pages in Chromium, at the width of a laptop and of a phone; skipped without Chromium."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html import escape, unescape
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from spmdkit.layouts.resolve import resolve
from spmdkit.layouts.tensor_layout import TensorLayout
from spmdkit.mesh.device_mesh import DeviceMesh
from spmdkit.parallel.schedule.builders import make_schedule
from spmdkit.report.charts import Mark
from spmdkit.report.comparison import write_comparison
from spmdkit.report.page import write_plan_page, write_report
from spmdkit.report.time_course import Course, Stretch
from spmdkit.runtime.goodput import KINDS, Goodput
from support.plans import ALTERNATIVES, make_plan
from support.reports import COLLECTIVES, COSTS, METRICS, make_facts, make_record

pytestmark = pytest.mark.slow

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
WIDTHS = (1280, 390)
HERE = Path(__file__).parent
LISTEN = """<script>
window.messages = [];
addEventListener('error', event => messages.push(event.message));
console.error = console.warn = (...words) => messages.push(words.join(' '));
</script>"""
PAGES = ("report", "compare")
LONG = "runs/" + "of_a_long_name" * 5


@pytest.fixture(scope="module")
def laid_out(tmp_path_factory):
    """The measurements of both pages with every part, by page and width."""
    if CHROMIUM is None:
        pytest.skip("no Chromium on PATH: install the package chromium, or google-chrome")
    folder = tmp_path_factory.mktemp("chromium")
    write_run_page(folder / "report.html")
    write_comparison_page(folder / "compare.html")
    write_plan_page(folder / "plan.html", make_plan("h100:16x8", {"data": 4, "fsdp": 32}), ALTERNATIVES)
    texts = {name: (folder / f"{name}.html").read_text(encoding="utf-8") for name in (*PAGES, "plan")}
    pages = {name: text.replace("<head>", f"<head>{LISTEN}", 1) for name, text in texts.items()}
    frames = "".join(
        f'<iframe name="{name}" width="{width}" height="900" srcdoc="{escape(text)}"></iframe>'
        for name, text in pages.items()
        for width in WIDTHS
    )
    outer, measure = folder / "outer.html", (HERE / "measure.js").read_text(encoding="utf-8")
    outer.write_text(
        "<!doctype html><meta charset=utf-8><style>iframe {border: 0}</style>"
        f'<pre id="found"></pre>{frames}<script>{measure}</script>',
        encoding="utf-8",
    )
    found = re.search(r'<pre id="found">(.+?)</pre>', printed_by_chromium(folder, outer), re.DOTALL)
    assert found
    return {(each["name"], each["width"]): each for each in json.loads(unescape(found[1]))}


def printed_by_chromium(folder, page):
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"]
    quiet = ["--disable-sync", "--disable-background-networking", "--disable-component-update"]
    own = f"--user-data-dir={folder / 'profile'}"
    words = [CHROMIUM, *options, *quiet, own, "--window-size=1400,2000", "--dump-dom", page.as_uri()]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert "id=" in ended.stdout, ended.stderr[-2000:]
    return ended.stdout


def write_run_page(path):
    mesh = DeviceMesh.simulated(8, data=2, fsdp=2, tensor=2)
    names = ["blocks/attention/query", "a_module_of_a_long_name/" * 6 + "kernel", "embed"]
    shapes = {name: jax.ShapeDtypeStruct((128, 384, 64 * size), jnp.float32) for size, name in enumerate(names, 1)}
    rules = iter(["fsdp: dim 0; tensor: dim 1", "fsdp: whole, under the floor of 16,384 B", "data: whole"])
    table = resolve(
        shapes, mesh, default=lambda path, leaf: (TensorLayout((("data", "fsdp"), "tensor", None), mesh), next(rules))
    )
    costs = replace(
        COSTS,
        found=COLLECTIVES[:2],
        notes=("On simulated devices this program is not the one that GPUs run.",),
        unexpected=("collective-permute over pipe: 66 predicted, none found",),
        schedule=make_schedule("1f1b", 4, 8),
    )
    stretches = [Stretch(9.0 * n, 9.0 * n + 9, {"step": 6.0, "data": 3.0}, 3 * n) for n in range(12)]
    events = [Mark(3 * n, kind, f"{kind} {n}", 9.0 * n) for n in range(4, 11) for kind in ("save", "start", "lost")]
    facts = make_facts(
        data="stdlib: source of Python 3.11.7 (386 files, 7,818,133 bytes); 28,321 training examples of 256 tokens",
        table=table,
        costs=costs,
        measured={"the process, with 8 devices": 3 << 30},
        sample="def sample():\n" + "    return" + " and more" * 40,
    )
    record = make_record(
        config={"run": {"dir": LONG}},
        facts=facts,
        samples=[{"step": 10, "text": "word " * 100}, {"step": 20, "text": "a" * 500}],
        goodput=Goodput({kind: 1.5**number for number, kind in enumerate(KINDS)}, starts=12, lost_steps=123_456),
        course=Course(stretches, events),
        metrics=[each | {"flops_per_second": 48.4e9} for each in METRICS],
    )
    write_report(record, path)


def write_comparison_page(path):
    """Ten runs, one with a long name, and figures of every size."""
    records = []
    for number in range(10):
        steps = range(1, 90 - number // 9)
        metrics = [{"step": 1000 * step, "loss": 1e6 / step**number, "grad_norm": 1e-7 * step} for step in steps]
        spent = Goodput({"step": 1e6, "start": 1e4 * number}, starts=1, lost_steps=0)
        config = {"data": {"files": ["corpus/**/*.txt"] * 4 * number}, "optimizer": {"long_key_" * 6 + str(number): 1}}
        name = LONG if number == 3 else f"run-{number}"
        facts = make_facts(costs=replace(COSTS, compiled={"total": 3 << 40}))
        records.append(
            make_record(folder=Path("/runs") / name, config=config, metrics=metrics, facts=facts, goodput=spent)
        )
    write_comparison(path, records)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("page", [*PAGES, "plan"])
def test_page_fits_the_screen(laid_out, page, width):
    """No element extends beyond the page, no label covers another, and wider elements scroll in their own box."""
    measured = laid_out[page, width]
    assert measured["width"] == measured["across"] == width
    assert [measured[name] for name in ("beyond", "outside", "covered")] == [[], [], []]
    assert set(measured["scrolling"]) <= ({"schedule"} if page == "report" else {"card scroll"})
    assert measured["loads"] == measured["unnamed"] == 0


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("page", PAGES)
def test_pointer_and_arrow_keys_show_values(laid_out, page, width):
    measured = laid_out[page, width]
    assert measured["errors"] == []
    tip = measured["tip"]
    assert tip["within"]
    assert tip["gone"]
    last, second = {"report": ("step 30", "step 20"), "compare": ("step 89,000", "step 2,000")}[page]
    assert tip["text"].startswith(last)
    assert tip["keys"].startswith(second)
    if page == "report":
        assert "training 2.1250" in tip["text"]
        assert "lost 10" in tip["text"], "the event there"
    else:
        assert f"{LONG} 1.4185" in tip["text"]


@pytest.mark.parametrize("width", WIDTHS)
def test_report_is_drawn_and_sortable(laid_out, width):
    measured = laid_out["report", width]
    assert measured["tallest"] < 130
    assert measured["ragged"] < 1, "the last row of tiles is as wide as the others"
    assert measured["pictured"] > 200, "the schedule"
    assert len(set(measured["sorted"])) == 3
    assert measured["sorted"] == sorted(measured["sorted"], reverse=True), "by the heading that was clicked"
