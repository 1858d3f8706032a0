"""The bar of the report: every kind with its share, the largest part the widest, nothing else."""

import re

import pytest
from spmdkit.training.goodput import Goodput
from spmdkit.training.report.goodput import goodput_section

FOUND = Goodput({"step": 930.0, "save": 20.0, "start": 30.0, "lost": 15.0, "restart": 5.0}, starts=3, lost_steps=1200)


def test_every_kind_has_its_part_and_its_line():
    html = goodput_section(FOUND)
    assert "goodput 93.0 % of 16:40 min, 3 starts, 1,200 steps computed again" in html
    parts = dict(re.findall(r'<i class="(\w+)" style="flex-grow:([\d.]+)"', html))
    assert list(parts) == ["step", "lost", "save", "start", "restart"]
    assert {kind: float(share) for kind, share in parts.items()} == pytest.approx(
        {"step": 0.93, "lost": 0.015, "save": 0.02, "start": 0.03, "restart": 0.005}
    )
    assert re.findall(r"<span>([\w ]+)</span><b>([\d.]+) %</b><small>([^<]+)<", html)[0] == (
        "steps that count",
        "93.0",
        "15:30 min",
    )


def test_a_kind_that_is_not_known_is_shown_by_its_name():
    assert "<span>&lt;x&gt;</span>" in goodput_section(Goodput({"step": 1.0, "<x>": 1.0}, 1, 0))
