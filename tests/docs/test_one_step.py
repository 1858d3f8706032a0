"""docs/one-step.md shows the code that runs, and docs/performance.md what was measured."""

import re

import pytest
from support.pages import ROOT

CUT = re.compile(r"^\[[^\]]+\]\(\.\./(?P<file>[^)]+)\)\n\n```py\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
CUTS = [(match["file"], match["code"]) for match in CUT.finditer((ROOT / "docs" / "one-step.md").read_text("utf-8"))]


def test_every_piece_of_code_names_its_file():
    text = (ROOT / "docs" / "one-step.md").read_text(encoding="utf-8")
    assert len(CUTS) == text.count("```py\n") > 10


@pytest.mark.parametrize(("file", "code"), CUTS, ids=lambda value: value.splitlines()[0].strip())
def test_quoted_code_is_in_its_file(file, code):
    """Line by line, in this order and next to each other but where `...` stands."""
    source = [line.strip() for line in (ROOT / file).read_text(encoding="utf-8").splitlines()]
    at = 0
    for part in re.split(r"^\.\.\.\n", code, flags=re.MULTILINE):
        lines = [line.strip() for line in part.splitlines()]
        found = [start for start in range(at, len(source)) if source[start : start + len(lines)] == lines]
        assert found, f"{file} no longer has:\n{part}"
        at = found[0] + len(lines)


MEASURED = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8").split("## Measurements")[1]
RESULTS = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
ROWS = [line.split("|")[1:-1] for line in MEASURED.splitlines() if re.match(r"\| .*\d", line)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip())
def test_performance_row_was_measured(row):
    (measured,) = (line for line in RESULTS.splitlines() if line.startswith(f"|{row[0]}|"))
    numbers = [cell.strip() for cell in row[1:] if cell.strip() != "1"]
    assert numbers
    assert [number for number in numbers if not re.search(rf"(?<![\d.,]){re.escape(number)}(?![\d])", measured)] == []
