"""docs/figures.py: what a page shows is what its commands print, and one command renews it."""

import contextlib
import re

import figures
import picture
import pytest
from figures import PAGES, renew, run_command, write_files
from spmdkit.launch.cli import main
from support.pages import name

HELD = [(page, figure) for page in PAGES for figure in figures.figures(page.read_text(encoding="utf-8"))]


def shown_as(value):
    return name(value) if not isinstance(value, figures.Figure) else (value.command or value.body.splitlines()[0])


@pytest.mark.parametrize(
    ("page", "figure"),
    [
        pytest.param(*held, marks=pytest.mark.slow if {"explain", "--dry-run"} & {*shown_as(held[1]).split()} else ())
        for held in HELD
        if not held[1].kinds
    ],
    ids=shown_as,
)
def test_pages_show_current_output(page, figure, tmp_path, monkeypatch, capsys):
    """Those whose numbers are the same on every machine; the commands run in this process."""

    def run(line, folder):
        with contextlib.suppress(SystemExit):
            main(figures.words_typed(line)[1:])
        printed = capsys.readouterr()
        return printed.out + printed.err

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", figures.COLUMNS)
    write_files(page.read_text(encoding="utf-8"), tmp_path)
    assert renew(figure, run, tmp_path) == (figure.body, []), "`make figures` renews it"


@pytest.mark.long
@pytest.mark.slow
def test_readme_losses_are_reproduced(tmp_path):
    """Times differ; what is printed, and every loss to 1%, does not."""
    text = PAGES[0].read_text(encoding="utf-8")
    write_files(text, tmp_path)
    figure = next(figure for figure in figures.figures(text) if "timed" in figure.kinds)
    new, lost = renew(figure, run_command, tmp_path)
    assert lost == []
    assert losses(new) == pytest.approx(losses(figure.body), rel=0.01)


def losses(text):
    lines = "\n".join(line for line in text.splitlines() if line.startswith("step "))
    return [float(loss) for loss in re.findall(r"(?:loss|eval) (\S+)", lines)]


@pytest.mark.parametrize("file", figures.pictures())
def test_pictures_are_current(file):
    drawn = figures.pictures()[file]()
    assert (figures.PICTURES / file).read_text(encoding="utf-8") == drawn, "`make figures` renews it"


def test_each_row_of_the_picture_is_a_copy_and_each_column_a_shard():
    table = picture.layouts_drawn()
    assert [table.row(path).layout.axes for path in ("up", "down")] == [("fsdp", None)] * 2
    assert "rows 224 to 255" in picture.draw()
