"""The page of a plan: one HTML file with its figures, which loads nothing; values never become markup."""

import re

import pytest
from spmdkit.report.page import write_plan_page
from support.plans import ALTERNATIVES, make_plan
from support.reports import Page


@pytest.fixture
def page(tmp_path):
    """A function that writes the page of a plan and reads it."""

    def write(plan, alternatives=()):
        write_plan_page(tmp_path / "plan.html", plan, alternatives)
        return (tmp_path / "plan.html").read_text(encoding="utf-8")

    return write


def test_shows_the_figures_of_the_plan(page):
    html = page(make_plan("h100:2x8", {"data": 2, "fsdp": 8}), ALTERNATIVES)
    found = Page(html)
    assert found.text("lead") == "16 × NVIDIA H100 80GB HBM3 · compiled in 3.0 s"
    tiles = re.findall(r'<div class="card tile"><span>(.*?)</span><b>(.*?)</b>', html)
    assert tiles == [
        ("time per step", "1.0 s"),
        ("tokens per second", "1.00k"),
        ("exposed communication", "50.0%"),
        ("memory per device", "8 GiB"),
    ]
    assert "total8 GiBcapacity79.1 GiB" in re.sub(r"\s", "", found.text("amounts")).replace("GiB", " GiB")
    assert "a note & a half" in found.text("note")
    assert not [value for name, value in found.attributes if name in ("src", "href")]


def test_colors_devices_by_their_hosts(page):
    html = page(make_plan("h100:2x8", {"data": 2, "fsdp": 8}))
    hues = dict(re.findall(r'class="device part" style="--h:([\d.]+)" title="device (\d+), host', html))
    assert len(hues) == 2, "one color for each host"
    assert 'title="device 7, host 0"' in html
    assert 'title="device 8, host 1"' in html
    slice_of_tpus = page(make_plan("v5p:2x2x2", {"fsdp": 8}))
    assert 'class="device part"' not in slice_of_tpus
    assert "one slice, 2x2x2" in slice_of_tpus


def test_draws_the_time_of_each_queue(page):
    """Kernels fill 3/4 of the step, then they wait; the first half has no collective."""
    html = page(make_plan("h100:2x8", {"fsdp": 16}))
    areas = dict(re.findall(r'<path class="(step|lost|save)" d="(.*?)"/>', html))
    counts = {kind: len(re.findall(r"h1v-100\.0h-1z", area)) for kind, area in areas.items()}
    bins = counts["step"] + counts["lost"]
    assert counts == {"step": 0.75 * bins, "lost": 0.25 * bins, "save": 0.5 * bins}
    assert "<title>collectives between hosts</title>" in html


def test_lists_alternatives_with_their_reasons(page):
    html = page(make_plan("h100:1x8", {"fsdp": 8}), ALTERNATIVES)
    assert "pipe 2 × fsdp 4, accumulate 1, remat full" in html
    assert "<td>fastest</td>" in html
    assert "slower: &lt;16&gt;" in html
    assert "Alternatives" not in page(make_plan("h100:1x8", {"fsdp": 8}))


def test_marks_an_analytic_plan(page):
    html = page(make_plan("h100:1x8", {"fsdp": 8}, compiled=False))
    assert "ANALYTIC, not compiled" in html
    assert "may fit" in html
    assert "the temporaries are unknown" in html
    assert "One step of one device" not in html
