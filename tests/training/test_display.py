"""The display: live on a terminal, plain lines elsewhere, silent on other processes, never in the way."""

import io
import re

import pytest
from rich.console import Console
from spmdkit.training import display as display_module
from spmdkit.training.display import make_display, sparkline

RECORD = {
    "step": 40,
    "loss": 2.34567,
    "grad_norm": 0.8123,
    "tokens_per_second": 12345.6,
    "flops_per_second": 3.21e9,
    "seconds": 0.5,
    "learning_rate": 1e-3,
}

ENVIRONMENT = {"TERM": "xterm"}


@pytest.fixture
def shown():
    """A function that gives a console and one that gives what was printed, without colors."""

    def make(terminal: bool, width: int = 200):
        file = io.StringIO()
        console = Console(
            file=file, force_terminal=terminal, width=width, color_system=None, _environ={"TERM": "xterm"}
        )
        return console, lambda: re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue())

    return make


def test_plain_lines_hold_every_metric_and_the_time_left(shown):
    console, text = shown(terminal=False)
    with make_display(300, 0, "quickstart", console) as display:
        display.update(RECORD)
        display.update({"step": 300, "loss": 2.0, "eval_loss": 2.1, "seconds": 0.5})
    assert text().splitlines() == [
        "quickstart",
        "step  40/300  loss 2.3457  grad 0.812  12.3k tokens/s  3.21 GFLOP/s  500 ms/step  2:10 min left",
        "step 300/300  loss 2.0000  eval 2.1000  500 ms/step",
    ]


def test_rows_per_second_take_the_place_of_tokens(shown):
    console, text = shown(terminal=False)
    with make_display(300, 0, "quickstart", console) as display:
        display.update(RECORD | {"rows_per_second": 950.0})
    assert "  950 rows/s  3.21 GFLOP/s" in text()
    assert "tokens/s" not in text()


@pytest.mark.parametrize("terminal", [True, False])
def test_what_data_and_models_write_moves_no_cursor(shown, terminal):
    """Only what rich itself sends to a terminal is left, and `shown` has taken that away."""
    console, text = shown(terminal)
    with make_display(300, 0, "data \x1b]0;title\x07", console) as display:
        display.message("a sample \x1b[31mred\x9b2J\u202e\n\tin two lines")
        panel = render(console, display) if terminal else text()
    assert r"data \x1b]0;title\x07" in panel
    assert "a sample \\x1b[31mred\\x9b2J\\u202e\n" in text()
    assert not {"\x07", "\x9b", "\u202e"} & set(panel + text())


def test_the_live_panel_holds_the_same(shown):
    console, text = shown(terminal=True)
    with make_display(300, 0, "quickstart", console) as display:
        assert "compiling" in render(console, display)
        display.update(RECORD | {"eval_loss": 2.5})
        display.update({"step": 50, "loss": 2.2, "seconds": 0.5})
        panel = render(console, display)
        display.message("checkpoint of step 50")
    assert "quickstart" in panel
    assert "50/300 16 %" in panel
    assert "left" in panel
    assert "loss 2.2000  eval 2.5000" in panel, "the last evaluation stays"
    assert "█▁" in panel, "the small chart falls"
    assert "checkpoint of step 50" in text()


def render(console: Console, display) -> str:
    with console.capture() as captured:
        console.print(display._panel())
    return captured.get()


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("record", [{}, {"step": 7}, {"loss": float("nan")}, {"loss": None}, {"surprise": "text"}])
def test_missing_and_odd_metrics_are_no_error(shown, terminal, record):
    console, text = shown(terminal)
    with make_display(10, 5, "odd", console) as display:
        display.update(record)
        display.message("[bold]as it is[/bold]")
    assert "[bold]as it is[/bold]" in text()
    assert "nan" not in text()


def test_narrow_terminals_are_no_error(shown):
    console, text = shown(terminal=True, width=24)
    with make_display(10, 0, "a title that is longer than the terminal is wide", console) as display:
        display.update(RECORD)
    assert "loss" in text()


def test_other_processes_show_nothing(shown, monkeypatch):
    console, text = shown(terminal=True)
    monkeypatch.setattr(display_module, "is_main_process", lambda: False)
    with make_display(10, 0, "rank 1", console) as display:
        display.update(RECORD)
        display.message("hello")
    assert text() == ""


def test_the_estimate_is_the_median_of_recent_steps(shown):
    console, _ = shown(terminal=False)
    display = make_display(110, 0, "estimate", console)
    assert display.seconds_left() is None
    for step, seconds in ((10, 30.0), (20, 1.0), (30, 1.0)):  # the first held a compilation
        display.update({"step": step, "seconds": seconds})
    assert display.seconds_left() == pytest.approx(80, abs=1)


def test_sparkline_spans_its_range():
    assert sparkline([3.0, 2.0, 1.0]) == "█▅▁"
    assert sparkline([1.0, 1.0]) == "▁▁"
