"""The report: one file, whole HTML, the run's own numbers, nothing loaded from elsewhere."""

import jax
import pytest
from report_page import COSTS, METRICS, SUMMARY, Page, table_on
from spmdkit.launch.drawing.schedule_svg import draw_svg
from spmdkit.layouts.resolve import resolve
from spmdkit.mesh.device_mesh import DeviceMesh
from spmdkit.parallel.schedule.builders import make_schedule
from spmdkit.training.report.report import write_report

PICTURE = draw_svg(make_schedule("1f1b", 4, 8))


@pytest.fixture
def report(tmp_path):
    """A function that writes a report and reads it back."""
    mesh = DeviceMesh.simulated(8, data=2, fsdp=4)

    def write(
        mesh=mesh, table=None, metrics=METRICS, summary=SUMMARY, sample="def f(): pass", config=None, costs=COSTS
    ):
        write_report(
            tmp_path / "report.html",
            config=config or {"run": {"seed": 0}},
            metrics=metrics,
            table=table or table_on(mesh),
            mesh=mesh,
            summary=summary,
            sample=sample,
            costs=costs,
        )
        assert [file.name for file in tmp_path.iterdir()] == ["report.html"]
        return (tmp_path / "report.html").read_text(encoding="utf-8")

    return write


def test_the_page_holds_the_numbers_of_the_run(report):
    page = Page(report())
    assert page.text("h1") == "quick & easy"
    assert page.text("lead") == "finished · 8 cpu devices: data 2 × fsdp 4"
    assert "evaluation loss2.2500" in page.text("card tile")
    assert "bigram 2.4812" in page.text("name")
    for heading in (
        "What the model writes",
        "Memory of each device",
        "Collectives of a step",
        "Layout of every",
        "Con",
    ):
        assert heading in page.text("h2")


def test_each_layout_is_drawn_once(report):
    html = report()
    assert html.count('class="card array') == 3, "the mesh, the largest split one, the largest whole one"
    assert 'title="cpu:5 holds part B"' in html


def test_nothing_is_loaded_from_elsewhere(report):
    html = report(costs=COSTS._replace(schedule_svg=PICTURE))
    names = {name for name, _ in Page(html).attributes}
    assert not names & {"src", "href", "srcset", "data"}
    assert "http" not in html.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert "url(" not in html.replace("url(#hatch)", "")
    assert "@import" not in html


NASTY = "</script><script>alert(1)</script><b>bold</b> &amp; \x00\x1b[2J\ud800\u202e é"


def test_text_of_every_kind_stays_text(report):
    table = resolve({NASTY: jax.ShapeDtypeStruct((32, 8), "float32")}, DeviceMesh.simulated(8, fsdp=8))
    costs = COSTS._replace(held={NASTY: 1}, notes=(NASTY,), schedule_text=NASTY)
    summary = SUMMARY | {"title": NASTY, "data": NASTY, "<i>": "<u>", "<s>_loss": 2.0, NASTY: 3}
    html = report(table=table, sample=NASTY, config={"note": NASTY[:40]}, summary=summary, costs=costs)
    page = Page(html)
    seen = r"</script><script>alert(1)</script><b>bold</b> &amp; \x00\x1b[2J\ud800\u202e é"
    for part in ("h1", "title", "dd", "pre", "path", "th", "note", "card tile"):
        assert seen in page.text(part), part
    assert html.count("<script>") == 1
    assert not [tag for tag in ("<b>bold", "<u>", "<i>", "<s>") if tag in html]
    assert not {"\x00", "\x1b", "\u202e", "\ufffd"} & set(html)


@pytest.mark.parametrize("metrics", [[], [{}], [{"step": 1}], [{"step": 1, "loss": None, "eval_loss": float("nan")}]])
def test_missing_metrics_are_no_error(report, metrics):
    page = Page(report(metrics=metrics, summary={}, sample=None, costs=None))
    assert page.text("h1") == "spmdkit run"
    assert page.text("card tile") == "parameters2,4642.3 KiB on each device"
    assert "What the model writes" not in page.text("h2")
    assert "Collectives" not in page.text("h2")


def test_one_device_has_no_drawing(report):
    mesh = DeviceMesh.simulated(1)
    assert "Which device holds what" not in report(mesh=mesh)


def test_large_runs_stay_a_small_page(report):
    mesh = DeviceMesh.of([f"cuda:{i}" for i in range(1024)], data=256, fsdp=4)
    metrics = [{"step": step, "loss": 2 + step % 7 / 10, "eval_loss": 2.5} for step in range(30_000)]
    table = table_on(mesh, num_weights=500)
    html = report(mesh=mesh, table=table, metrics=metrics)
    assert len(html) < 600_000
    assert "1,024 cuda devices: data 256 × fsdp 4" in html
    Page(html)


def test_the_config_is_there_as_yaml(report):
    page = Page(report(config={"run": {"seed": 7}, "strategy": {"fsdp": 4, "data": 2}}))
    assert "strategy:\n  fsdp: 4\n  data: 2\n" in page.text("pre")
