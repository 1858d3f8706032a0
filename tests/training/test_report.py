"""The report: one file, whole HTML, the run's own numbers, nothing loaded from elsewhere."""

from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import pytest
from spmdkit.layouts.resolve import resolve
from spmdkit.layouts.tensor_layout import TensorLayout
from spmdkit.mesh.device_mesh import DeviceMesh
from spmdkit.training.report import write_report

VOID = {"meta", "br", "rect", "path", "polyline"}
METRICS = [
    {"step": 10, "loss": 4.5, "grad_norm": 1.5, "tokens_per_second": 9000.0, "seconds": 0.5, "learning_rate": 1e-3},
    {"step": 20, "loss": 3.25, "grad_norm": 1.25, "tokens_per_second": 11000.0, "seconds": 0.25, "eval_loss": 3.375},
    {"step": 30, "loss": 2.125, "grad_norm": 1.0, "tokens_per_second": 10000.0, "seconds": 0.25, "eval_loss": 2.25},
]
SUMMARY = {"title": "quick & easy", "status": "finished", "bigram_loss": 2.4812, "seconds": 75.0, "tokens": 1234567}


class Page(HTMLParser):
    """Reads a page strictly: every element closed in order; collects text by class and all attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[tuple[str, str]] = []
        self.texts: dict[str, list[str]] = {}
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        if tag not in VOID:
            self.open.append((tag, dict(attrs).get("class") or ""))

    def handle_startendtag(self, tag, attrs):
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if self.open:
            for name in {self.open[-1][0], *(css for _, css in self.open)}:
                self.texts.setdefault(name, []).append(data)

    def text(self, name: str) -> str:
        return "".join(self.texts.get(name, []))


def table_on(mesh: DeviceMesh, num_weights: int = 1):
    weights = {f"w{'x' * i}": jax.ShapeDtypeStruct((64, 32), jnp.float32) for i in range(num_weights)}
    blocks = [{"kernel": jax.ShapeDtypeStruct((16, 8), jnp.bfloat16)} for _ in range(3)]
    params = {"blocks": blocks, "norm": jax.ShapeDtypeStruct((32,), jnp.float32), **weights}

    def default(path, leaf):
        split = len(leaf.shape) == 2
        return TensorLayout(("fsdp", None) if split else (None,), mesh), "fsdp: dim 0" if split else "small <16 KiB>"

    return resolve(params, mesh, default=default)


@pytest.fixture
def report(tmp_path):
    """A function that writes a report and reads it back."""
    mesh = DeviceMesh.simulated(8, data=2, fsdp=4)

    def write(mesh=mesh, table=None, metrics=METRICS, summary=SUMMARY, sample="def f(): pass", config=None):
        path = tmp_path / "report.html"
        table = table or table_on(mesh)
        config = config or {"run": {"seed": 0}}
        write_report(path, config=config, metrics=metrics, table=table, mesh=mesh, summary=summary, sample=sample)
        assert [file.name for file in tmp_path.iterdir()] == ["report.html"]
        return path.read_text(encoding="utf-8")

    return write


def test_the_page_holds_the_numbers_of_the_run(report):
    page = Page(report())
    tiles = page.text("card tile")
    assert page.text("h1") == "quick & easy"
    assert page.text("lead") == "finished · 2.46k parameters · 8 cpu device(s): data 2 × fsdp 4"
    assert "evaluation loss2.2500" in tiles
    assert "0.2312 below bigram (2.4812)" in tiles
    assert "training loss2.1250at step 30" in tiles
    assert "tokens per second10.0kmedian" in tiles
    assert "seconds per step250 msmedian" in tiles
    assert "time trained1:15 min" in tiles
    assert "tokens1,234,567" in tiles
    assert "bigram 2.4812" in page.text("name")


def test_an_evaluation_above_the_reference_says_so(report):
    page = Page(report(summary=SUMMARY | {"eval_loss": 2.5}))
    assert "evaluation loss2.5000" in page.text("card tile")
    assert page.text("bad") == "0.0188 above bigram (2.4812)"


def test_the_table_groups_layers_and_adds_up(report):
    page = Page(report())
    assert "blocks/{0..2}/kernel" in page.text("path")
    assert "3 × 16" not in page.text("shape")
    assert "16 fsdp ÷4 × 8" in page.text("shape")
    assert "1/4 of 768 B" in page.text("number")
    assert "small <16 KiB>" in page.text("rule")
    assert "5 arrays, 2,464 elements, 8.9 KiB" in page.text("tfoot") + page.text("td")


def test_each_layout_is_drawn_once(report):
    html = report()
    assert html.count('class="card array') == 3, "the mesh, the largest split one, the largest whole one"
    assert 'title="cpu:5 holds part B"' in html


def test_nothing_is_loaded_from_elsewhere(report):
    html = report()
    names = {name for name, _ in Page(html).attributes}
    assert not names & {"src", "href", "srcset", "data"}
    assert "http" not in html
    assert "url(" not in html
    assert "@import" not in html


def test_text_of_every_kind_stays_text(report):
    nasty = "</script><script>alert(1)</script><b>bold</b> &amp; \x00\x1b\ud800 é"
    html = report(sample=nasty, config={"note": nasty[:40]}, summary=SUMMARY | {"title": nasty[:40], "<i>": "<u>"})
    page = Page(html)
    assert "</script><script>alert(1)</script><b>bold</b> &amp; ␀␛? é" in page.text("pre")
    assert html.count("<script>") == 1
    assert "<b>bold" not in html
    assert "<u>" not in html


@pytest.mark.parametrize("metrics", [[], [{}], [{"step": 1}], [{"step": 1, "loss": None, "eval_loss": float("nan")}]])
def test_missing_metrics_are_no_error(report, metrics):
    page = Page(report(metrics=metrics, summary={}, sample=None))
    assert page.text("h1") == "spmdkit run"
    assert "parameters per device" in page.text("card tile")
    assert "What the model writes" not in page.text("h2")


def test_one_device_has_no_drawing(report):
    mesh = DeviceMesh.simulated(1)
    assert "Which device holds what" not in report(mesh=mesh)


def test_large_runs_stay_a_small_page(report):
    mesh = DeviceMesh.of([f"cuda:{i}" for i in range(1024)], data=256, fsdp=4)
    metrics = [{"step": step, "loss": 2 + step % 7 / 10, "eval_loss": 2.5} for step in range(30_000)]
    table = table_on(mesh, num_weights=500)
    html = report(mesh=mesh, table=table, metrics=metrics)
    assert len(html) < 600_000
    assert "504 arrays" in html
    assert "(202 smaller rows are not shown)" in html
    Page(html)


def test_the_config_is_there_as_yaml(report):
    page = Page(report(config={"run": {"seed": 7}, "strategy": {"fsdp": 4, "data": 2}}))
    assert "strategy:\n  fsdp: 4\n  data: 2\n" in page.text("pre")
