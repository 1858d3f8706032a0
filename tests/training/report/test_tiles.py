"""The head figures of the report: each number once, written for people, and words beside them."""

import pytest
from report_page import METRICS, SUMMARY, Page, table_on
from spmdkit.mesh.device_mesh import DeviceMesh
from spmdkit.training.report.tiles import facts, references, tiles


@pytest.fixture(scope="module")
def table():
    return table_on(DeviceMesh.simulated(8, data=2, fsdp=4))


def shown(table, metrics=METRICS, summary=SUMMARY, memory=27_204_784) -> Page:
    return Page(tiles(metrics, table, summary, memory))


def test_every_number_once(table):
    text = shown(table).text("card tile")
    for tile in (
        "evaluation loss2.25000.2312 below bigram (2.4812)",
        "training loss2.1250at step 30",
        "tokens per second10.0kmedian",
        "time per step250 msmedian",
        "model FLOP/s48.4 GFLOP/sall devices together",
        "time trained1:15 min30 steps",
        "parameters2,4642.3 KiB on each device",
        "memory per device25.9 MiBof the compiled step",
        "tokens1,234,567",
    ):
        assert text.count(tile) == 1
        text = text.replace(tile, "")
    assert text == ""


def test_a_model_without_tokens_has_rows_per_second(table):
    text = shown(table, [record | {"rows_per_second": 500.0} for record in METRICS]).text("card tile")
    assert "rows per second500median" in text
    assert "tokens per second" not in text


def test_an_evaluation_above_the_reference_says_so(table):
    page = shown(table, summary=SUMMARY | {"eval_loss": 2.5})
    assert page.text("bad") == "0.0188 above bigram (2.4812)"
    assert not page.text("good")


def test_numbers_are_written_for_people(table):
    summary = {"cache_bytes": 27_204_784, "bytes_read": 3 << 30, "stall_seconds": 0.043, "ratio": 0.12345678}
    page = shown(table, metrics=[], summary=summary, memory=None)
    text = page.text("card tile")
    assert text.endswith("cache25.9 MiBread3 GiBstall43.0 msratio0.123457")


def test_words_are_no_tiles(table):
    page = shown(table)
    assert "stdlib" not in page.text("card tile")
    assert "transformer" not in page.text("card tile")
    lines = Page(facts(SUMMARY))
    assert lines.text("dt") == "modeldata"
    assert lines.text("dd") == f"transformer{SUMMARY['data']}"
    assert facts({"title": "a run", "steps": 3}) == ""


def test_losses_to_compare_with_are_those_of_the_summary():
    summary = {"eval_loss": 1.0, "bigram_loss": 2.5, "last_run_loss": 1.5, "lost_loss": None}
    assert [(line.name, line.value) for line in references(summary)] == [("bigram", 2.5), ("last run", 1.5)]
