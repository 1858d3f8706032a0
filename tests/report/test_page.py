"""The report of a run: one HTML file with the numbers of the run, which loads nothing; values never become markup."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from spmdkit.layouts.resolve import resolve
from spmdkit.mesh.device_mesh import DeviceMesh
from spmdkit.parallel.collectives import Collective
from spmdkit.parallel.schedule.builders import make_schedule
from spmdkit.report.page import MAX_SAMPLES, figures_of, write_report
from spmdkit.report.time_course import course_of
from spmdkit.runtime.goodput import Goodput
from support.reports import COLLECTIVES, COSTS, METRICS, Page, make_facts, make_record, table_on


@pytest.fixture
def report(tmp_path):
    """A function that writes the report of a record and reads it."""

    def write(**changes):
        path = write_report(make_record(**changes), tmp_path / "report.html")
        assert [file.name for file in tmp_path.iterdir()] == ["report.html"]
        return path.read_text(encoding="utf-8")

    return write


def test_shows_the_numbers_of_the_run(report):
    html = report(goodput=Goodput({"step": 3.0, "start": 1.0}, 1, 0))
    page = Page(html)
    assert page.text("h1") == page.texts["title"][0] == "quick & easy"
    assert page.text("lead") == "finished, 30 steps · 8 cuda devices: data 2 × fsdp 4"
    assert page.text("dd") == "mlpdigits"
    assert "bigram 2.4812" in page.text("name")
    headings = page.text("h2")
    for heading in (
        "Where the time went",
        "Memory of each device",
        "Collectives of a step",
        "Layout of every",
        "Config",
    ):
        assert heading in headings
    assert "goodput 75.0 % of 4.0 s" in page.text("small")
    assert "run:\n  dir: quick & easy\n  seed: 0\n" in page.text("pre")
    assert html.count('class="card array') == 3, "the mesh, the largest split array, the largest whole array"
    assert 'title="cuda:5 holds part B"' in html
    assert re.findall(r'aria-label="(\S+) in \d parts?"', html) == ["w", "norm"]


def tiles(html):
    found = re.findall(r'<div class="card tile"><span>(.*?)</span><b>(.*?)</b>(.*?)</div>', html, re.DOTALL)
    return {
        name: (value, re.sub(r"<small[^>]*>", "", remark).replace("</small>", "|")) for name, value, remark in found
    }


def test_shows_every_number_once(report):
    metrics = [record | {"flops_per_second": 48.4e9} for record in METRICS]
    assert tiles(report(metrics=metrics)) == {
        "evaluation loss": ("2.2500", "0.2312 below bigram (2.4812)|"),
        "training loss": ("2.1250", "at step 30|"),
        "tokens per second": ("10.0k", "median|"),
        "time per step": ("250 ms", "median|"),
        "model FLOP/s": ("48.4 GFLOP/s", "all devices together|"),
        "time trained": ("10.0 s", "30 steps|"),
        "parameters": ("2,464", "2.3 KiB on each device|"),
        "memory per device": ("27 MiB", "of the compiled step|"),
    }


def test_loss_above_a_reference_is_bad_and_rows_replace_tokens(report):
    html = report(metrics=[{"step": 3, "eval_loss": 2.5, "rows_per_second": 500.0}])
    assert Page(html).text("bad") == "0.0188 above bigram (2.4812)"
    assert tiles(html)["rows per second"] == ("500", "median|")
    assert "tokens per second" not in tiles(html)


def test_draws_one_of_the_whole_arrays(report):
    table = resolve({"a": jnp.zeros(8), "b": jnp.zeros((8, 8))}, DeviceMesh.simulated(8, data=8))
    assert re.findall(r'aria-label="(\S+) in \d parts?"', report(facts=make_facts(table=table))) == ["b"]


def test_draws_the_speed_that_counts():
    assert set(figures_of([{"tokens_per_second": 1.0, "rows_per_second": 2.0}])) == {
        "rows_per_second", "grad_norm", "learning_rate",
    }  # fmt: skip


def test_shows_own_metrics(report):
    html = report(metrics=[*METRICS, {"step": 40, "accuracy": 0.5, "eval_accuracy": 0.25}])
    titles = re.findall(r"<figcaption><b>([^<]*)", html)
    assert titles == ["Loss", "Tokens per second", "Gradient norm", "Learning rate", "accuracy"]


def test_loads_nothing(report):
    html = report(facts=make_facts(costs=replace(COSTS, schedule=make_schedule("1f1b", 4, 8))))
    assert html.count("<svg xmlns") == 1
    names = {name for name, _ in Page(html).attributes}
    assert not names & {"src", "href", "srcset", "data"}
    assert "http" not in html.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert "url(" not in html.replace("url(#hatch)", "")
    assert "@import" not in html


NASTY = "</script><script>alert(1)</script><b>bold</b> &amp; \x00\x1b[2J\ud800\u202e é"
SEEN = r"</script><script>alert(1)</script><b>bold</b> &amp; \x00\x1b[2J\ud800\u202e é"


def test_values_never_become_markup(report):
    table = resolve({NASTY: jax.ShapeDtypeStruct((32, 8), "float32")}, DeviceMesh.simulated(8, fsdp=8))
    costs = replace(COSTS, held={NASTY: 1}, notes=(NASTY,), unexpected=(NASTY,), schedule_text=NASTY)
    costs = replace(costs, found=(Collective(NASTY, (NASTY,), 1, 1),))
    figures = {"<s>_loss": 2.0}
    facts = make_facts(table=table, costs=costs, data=NASTY, sample=NASTY, figures=figures, measured={NASTY: 1})
    html = report(
        config={"run": {"dir": NASTY}, "note": NASTY[:40]},
        facts=facts,
        samples=[{"step": 1, "text": NASTY}],
        metrics=[*METRICS, {"step": 40, NASTY: 0.5}],
        goodput=Goodput({"step": 1.0, NASTY: 1.0}, 1, 0),
        course=course_of([{"kind": NASTY, "seconds": 1.0, "at": at} for at in range(4)]),
    )
    page = Page(html)
    for part in ("h1", "title", "dd", "pre", "path", "th", "note", "card", "card samples", "chart", "axis"):
        assert SEEN in page.text(part), part
    assert html.count("<script>") == 1
    assert not [tag for tag in ("<b>bold", "<s>") if tag in html]
    assert not {"\x00", "\x1b", "\u202e", "\ufffd"} & set(html)


def test_schedule_name_never_becomes_markup(report):
    schedule = make_schedule("zbv", 2, 4)
    html = report(facts=make_facts(costs=replace(COSTS, schedule=replace(schedule, name="<script>"))))
    assert "&lt;script&gt;: 2 stages" in html
    assert html.count("<script>") == 1


def test_missing_facts_leave_parts_out(report):
    html = report(facts=None, metrics=[{"step": 1, "loss": None, "eval_loss": float("nan")}])
    page = Page(html)
    assert page.text("lead") == "step 1 of 30"
    assert page.text("h2") == "Config"
    assert tiles(html) == {}


@pytest.mark.slow
def test_large_run_stays_a_small_page(report):
    mesh = DeviceMesh.of([f"cuda:{i}" for i in range(1024)], data=256, fsdp=4)
    metrics = [{"step": step, "loss": 2 + step % 7 / 10, "eval_loss": 2.5} for step in range(1, 30_000)]
    html = report(facts=make_facts(table=table_on(mesh, num_weights=1500)), metrics=metrics)
    assert len(html) < 600_000
    page = Page(html)
    assert "1,024 cuda devices: data 256 × fsdp 4" in page.text("lead")
    assert "1,504 arrays" in page.text("td")
    assert "(1,202 smaller rows not shown)" in page.text("td")
    assert '"card scroll long"' in html


def test_layout_table_groups_layers_and_adds_up(report):
    html = report()
    page = Page(html)
    assert "blocks/{0..2}/kernel" in page.text("path")
    assert "16 fsdp ÷4 × 8" in page.text("shape")
    assert "1/4 of 768 B" in page.text("number")
    assert "small <16 KiB>" in page.text("rule")
    assert "5 arrays, 2,464 elements, 8.9 KiB" in page.text("td")
    assert len(re.findall(r'<td class="path">', html)) == 3
    assert "card scroll long" not in html


def test_memory_is_in_binary_units(report):
    page = Page(report(facts=make_facts(measured={"device 0": 3 << 30})))
    assert page.text("amounts") == (
        "parameters804.5 KiBoptimizer1.6 MiBbatch6 KiB"
        "arguments3 MiBoutputs2 MiBtemporaries24 MiBaliased2 MiBtotal27 MiB"
    )
    assert page.text("total") == "total27 MiB"
    assert "device 0: 3 GiB" in page.text("p")


@pytest.mark.parametrize(
    ("found", "unexpected", "fewer", "css", "verdict", "tables"),
    [
        (COLLECTIVES, (), (), "good", "exactly as the strategies predict", 1),
        (COLLECTIVES[:2], (), (), "good", "as the strategies predict, besides what is left to XLA", 2),
        (COLLECTIVES[:2], (), ("merged <sums>",), "good", "fewer than the strategies predict", 2),
        (COLLECTIVES[:2], ("no <permute>",), ("merged <sums>",), "bad", "not as the strategies predict", 2),
    ],
)
def test_compares_collectives_with_prediction(report, found, unexpected, fewer, css, verdict, tables):
    costs = replace(COSTS, found=found, unexpected=unexpected, fewer=fewer)
    html = report(facts=make_facts(costs=costs, figures={}))
    page = Page(html)
    assert verdict in page.texts[css]
    assert html.count('<table class="grid collectives">') == tables
    assert "all-gatherfsdp1,0576 MiB" in page.text("collectives")
    assert (page.text("off") == "collective-permutepipe664 MiB") == (tables == 2)
    assert ("The compiled step, 1,059 collectives" in page.text("h3")) == (tables == 2)
    assert ("Not as predicted: no <permute>" in page.texts["note"]) == bool(unexpected)
    assert ("Fewer than predicted: merged <sums>" in page.texts["note"]) == bool(fewer)
    assert "Note: a note" in page.texts["note"]


def test_schedule_is_drawn_or_described(report):
    assert "a schedule" in Page(report()).texts["pre"]
    drawn = report(facts=make_facts(costs=replace(COSTS, schedule=make_schedule("1f1b", 4, 8))))
    assert drawn.count("shadowrootmode") == 1
    assert "a schedule" not in Page(drawn).texts["pre"]
    assert "Schedule of the pipeline" not in report(facts=make_facts(costs=replace(COSTS, schedule_text="")))


TEXTS = [{"step": 10 * number, "text": f"text {number}"} for number in range(1, 4)]


def test_last_sample_is_open_and_others_are_folded(report):
    page = Page(report(facts=make_facts(sample="at the end <b>"), samples=TEXTS))
    assert page.texts["pre"][0] == "at the end <b>"
    assert "3 earlier samples" in page.text("summary")
    assert page.text("card samples").count("text ") == 3
    without_end = Page(report(samples=TEXTS))
    assert without_end.texts["pre"][0] == "text 3"
    assert without_end.text("card samples").count("text ") == 2
    assert "What the model writes" not in report(samples=[{"step": 1}, {"text": "x"}])


def test_many_samples_are_chosen_evenly(report):
    many = [{"step": number, "text": f"text {number}"} for number in range(1000)]
    shown = [
        text for text in Page(report(facts=make_facts(sample="end"), samples=many)).texts["h3"] if "at step" in text
    ]
    assert len(shown) == MAX_SAMPLES
    assert (shown[0], shown[-1]) == ("at step 0", "at step 999")
