"""The page of several runs: every figure in the column of its run, curves over each other, only keys that differ."""

import re

import pytest
from report_page import METRICS, Page
from spmdkit.training.goodput import Goodput
from spmdkit.training.report.comparison import MISSING, ComparedRun, value_text, write_comparison

GOODPUT = Goodput({"step": 8.0, "save": 2.0}, starts=1, lost_steps=0)
LONGER = [*METRICS, {"step": 40, "loss": 1.5, "eval_loss": 2.0, "accuracy": 0.5, "eval_accuracy": 0.4}]
RUNS = [
    ComparedRun("a", METRICS, {"step": 30, "loss": 2.125, "tokens_per_second": 9e3, "predicted_bytes": 2048}, GOODPUT),
    ComparedRun("<b>", LONGER, {"step": 40, "loss": 1.5, "tokens_per_second": 8e3, "eval_accuracy": 0.4}),
]


@pytest.fixture
def page(tmp_path):
    def write(runs=RUNS, differences=None):
        write_comparison(tmp_path / "compare.html", runs, differences or {})
        assert [file.name for file in tmp_path.iterdir()] == ["compare.html"]
        return (tmp_path / "compare.html").read_text(encoding="utf-8")

    return write


def rows(html):
    """First cell -> the others, of every line of a table."""
    lines = re.findall(r"<tr><th scope=\"row\"[^>]*>(.*?)</th>(.*?)</tr>", html)
    return {name: re.findall(r"<td[^>]*>(.*?)</td>", cells) for name, cells in lines}


def test_every_figure_is_in_the_column_of_its_run(page):
    html = page()
    assert Page(html).text("lead runs") == "a <b> "
    found = rows(html)
    assert found["steps trained"] == ["30", "40"]
    assert found["training loss"] == ["2.1250", "1.5000"]
    assert found["memory per device, predicted"] == ["2 KiB", "–"]
    assert found["eval_accuracy"] == ["–", "0.4"]
    assert "devices" not in found
    assert re.findall(r"<td class=best>([^<]*)<", html) == ["1.5000", "9.00k"]


def test_curves_lie_over_each_other(page):
    charts = re.findall(r"<figcaption><b>([^<]*)</b>(.*?)</figcaption>", page())
    names = {title: re.findall(r'class="key (run\d)">', keys) for title, keys in charts}
    assert names["Training loss"] == names["Evaluation loss"] == ["run0", "run1"]
    assert names["accuracy"] == ["run1"]
    assert {"Learning rate", "Tokens per second", "Gradient norm", "accuracy, evaluation"} <= set(names)


def test_curves_that_coincide_are_drawn_in_stripes(page):
    """Two runs with the same losses and a third with others: without stripes the second line hides the first."""
    nearly = [record | {"loss": record["loss"] * (1 + 1e-7)} for record in METRICS]
    other = [record | {"loss": record["loss"] + 0.5} for record in METRICS]
    names = {"a": METRICS, "b": nearly, "c": other}
    html = page([ComparedRun(name, metrics, {"step": 30}) for name, metrics in names.items()])
    chart = html.split("<b>Training loss</b>")[1].split("</figure>")[0]
    assert "in stripes, the same curve: a, b<" in chart
    drawn = dict(re.findall(r'<polyline class="(run\d)"( style="[^"]*")? points', chart))
    assert drawn == {
        "run0": ' style="stroke-dasharray:9 9;stroke-dashoffset:0"',
        "run1": ' style="stroke-dasharray:9 9;stroke-dashoffset:-9"',
        "run2": "",
    }
    assert re.findall(r'class="dots (run\d)" style="stroke-width:(\d+)px"', chart) == [("run0", "11"), ("run1", "7")]


def test_figures_that_look_alike_tie(page):
    figures = [
        {"loss": 1.50001, "eval_loss": 2.0},
        {"loss": 1.50002, "eval_loss": 3.0},
        {"loss": 1.6, "eval_loss": 4.0},
    ]
    html = page([ComparedRun(str(number), METRICS, each) for number, each in enumerate(figures)])
    assert rows(html)["training loss"] == ["1.5000 <small>tie</small>", "1.5000 <small>tie</small>", "1.6000"]
    assert re.findall(r"<td class=best>(.*?)</td>", html) == ["1.5000 <small>tie</small>"] * 2 + ["2.0000"]


def test_runs_that_are_not_equally_far_are_told_of(page):
    assert "They are not equally far: a 30, &lt;b&gt; 40 steps." in page()
    assert "not equally far" not in page([RUNS[0], RUNS[0]._replace(name="c")])


def test_times_are_bars_of_their_own(page):
    html = page()
    assert html.count('<div class="parts"') == 1, "that of the run whose time is known"
    assert 'aria-label="steps that count 80.0 %, held up by saves 20.0 %"' in html


def test_only_keys_that_differ_are_there(page):
    found = rows(page(differences={"train.steps": [30, 40], "data.files": [["a*"], MISSING], "x": [None, "<i>"]}))
    assert found["train.steps"] == ["30", "40"]
    assert found["data.files"] == ["[&#x27;a*&#x27;]", "–"] or found["data.files"] == ["[a*]", "–"]
    assert found["x"] == ["null", "&lt;i&gt;"]
    assert "They are the same in every key." in page()


def test_nothing_is_loaded_from_elsewhere(page):
    html = page()
    assert not {name for name, _ in Page(html).attributes} & {"src", "href", "srcset", "data"}
    assert "http" not in html.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert html.count("<b>") == html.count("</b>"), "a name is no markup"


@pytest.mark.parametrize(
    ("value", "text"), [(1e-3, "0.001"), ("a", "a"), (None, "null"), ([1, {"a": True}], "[1, {a: true}]"), ("7", "'7'")]
)
def test_values_are_written_as_in_yaml(value, text):
    assert value_text(value) == text
