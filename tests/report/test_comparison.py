"""The page of several runs: every figure in the column of its run, shared charts, and only keys that differ."""

import json
import re
from pathlib import Path

import pytest
from spmdkit.report import comparison
from spmdkit.report.comparison import MISSING, config_differences, summarize
from spmdkit.report.run_record import read_run
from spmdkit.runtime.goodput import Goodput
from support.reports import METRICS, Page, make_record

LONGER = [*METRICS, {"step": 40, "loss": 1.5, "eval_loss": 2.0, "accuracy": 0.5, "eval_accuracy": 0.4}]
RUNS = [
    make_record(folder=Path("/runs/a"), goodput=Goodput({"step": 8.0, "save": 2.0}, starts=1, lost_steps=0)),
    make_record(folder=Path("/runs/<b>"), metrics=LONGER, facts=None, config={"train": {"steps": 40}}),
]


@pytest.fixture
def page(tmp_path):
    def write(*records):
        comparison.write_comparison(tmp_path / "compare.html", records or RUNS)
        assert [file.name for file in tmp_path.iterdir()] == ["compare.html"]
        return (tmp_path / "compare.html").read_text(encoding="utf-8")

    return write


def rows(html):
    """First cell -> the others, of every line of a table."""
    lines = re.findall(r"<tr><th scope=\"row\"[^>]*>(.*?)</th>(.*?)</tr>", html, re.DOTALL)
    return {name: re.findall(r"<td[^>]*>(.*?)</td>", cells) for name, cells in lines}


def best(html):
    return re.findall(r'<td class="best">(.*?)</td>', html)


def test_every_figure_is_in_the_column_of_its_run(page):
    html = page()
    assert Page(html).text("lead runs").split() == ["a", "<b>"]
    found = rows(html)
    assert found["steps trained"] == ["30", "40"]
    assert found["training loss"] == ["2.1250", "1.5000"]
    assert found["memory per device, predicted"] == ["27 MiB", "–"]
    assert found["eval_accuracy"] == ["–", "0.4"]
    assert "rows per second, median" not in found
    assert best(html)[:3] == ["1.5000", "2.0000", "2.0000"]
    assert "27 MiB" not in best(html), "the only one is not the best"
    assert 'aria-label="steps that count 80.0 %, blocked by saves 20.0 %"' in html
    assert html.count('<div class="parts"') == 1, "only the run with a known time split"


def test_curves_share_charts(page):
    charts = re.findall(r"<figcaption><b>([^<]*)</b>(.*?)</figcaption>", page(), re.DOTALL)
    colors = {title: re.findall(r"var\(--(run\d)\)", keys) for title, keys in charts}
    assert colors["Training loss"] == colors["Evaluation loss"] == ["run0", "run1"]
    assert colors["accuracy"] == ["run1"]
    assert {"Learning rate", "Tokens per second", "Gradient norm", "accuracy, evaluation"} <= set(colors)


def test_figures_that_look_the_same_tie(page):
    losses = [(1.50001, 2.0), (1.50002, 3.0), (1.6, 4.0)]
    html = page(
        *(
            make_record(folder=Path(f"/r/{n}"), metrics=[{"step": 1, "loss": loss, "eval_loss": other}], facts=None)
            for n, (loss, other) in enumerate(losses)
        )
    )
    assert rows(html)["training loss"] == ["1.5000 <small>tie</small>", "1.5000 <small>tie</small>", "1.6000"]
    assert best(html) == ["1.5000 <small>tie</small>"] * 2 + ["2.0000"] * 2


def test_higher_speed_and_goodput_are_better():
    higher = {"tokens_per_second", "rows_per_second", "flops_per_second", "goodput"}
    assert {name for name, row in comparison.ROWS.items() if row.best is max} == higher


def test_reports_different_lengths(page):
    assert "The runs have different lengths: a 30, &lt;b&gt; 40 steps." in page()
    assert "different lengths" not in page(RUNS[0], RUNS[0]._replace(folder=Path("/runs/c")))


def test_shows_only_keys_that_differ(page):
    one, two = ({"data": {"files": files}, "x": x, "y": 1} for files, x in ((["a*"], None), ({}, "<i>")))
    found = rows(page(RUNS[0]._replace(config=one), RUNS[1]._replace(config=two)))
    assert found["data.files"] == ["[a*]", "{}"] or found["data.files"] == ["[&#39;a*&#39;]", "{}"]
    assert found["x"] == ["null", "&lt;i&gt;"]
    assert "y" not in found
    assert "The configs have the same value for every key." in page(*(run._replace(config=one) for run in RUNS))


@pytest.mark.parametrize(
    ("folders", "names"),
    [
        (["/r/a", "/r/b"], ["a", "b"]),
        (["/r/one/run", "/r/two/run"], ["one/run", "two/run"]),
        (["/x/a", "/y/a"], ["x/a", "y/a"]),
    ],
)
def test_short_names_are_distinct(folders, names):
    assert comparison.short_names([Path(folder) for folder in folders]) == names


def test_finds_config_differences():
    one = {"run": {"dir": "a", "seed": 0}, "strategy": {"fsdp": {"size": 4}}, "callbacks": [], "sample": {}}
    two = {"run": {"dir": "b", "seed": 0}, "strategy": {"data": 2}, "callbacks": [{"name": "csv"}], "sample": {}}
    assert config_differences([one, two]) == {
        "strategy.fsdp.size": [4, MISSING],
        "strategy.data": [MISSING, 2],
        "callbacks": [[], [{"name": "csv"}]],
    }
    assert config_differences([one, one]) == {}


def test_summarizes_one_run(leave):
    record = read_run(leave())
    assert summarize([record], record.folder / "report.html").splitlines() == [
        f"{record.folder}: step 30 of 30, training loss 2.1250, evaluation loss 2.2500",
        f"Wrote {record.folder / 'report.html'}",
    ]


def test_summarizes_several_runs(leave, tmp_path):
    records = [read_run(leave("a")), read_run(leave("b", facts=False, train={"steps": 20}))]
    text = summarize(records, tmp_path / "compare.html")
    assert "1 key of their configs differ: train.steps" in text
    assert f"{tmp_path / 'b'}: report.json is missing" in text
    plain = json.loads(json.dumps(comparison.comparison_json(records, tmp_path / "compare.html")))
    assert plain["page"] == str(tmp_path / "compare.html")
    assert plain["config_differences"] == {"train.steps": [30, 20]}
    assert [(run["folder"], run["step"], run["eval_loss"]) for run in plain["runs"]] == [
        (str(tmp_path / "a"), 30, 2.25),
        (str(tmp_path / "b"), 30, 2.25),
    ]
