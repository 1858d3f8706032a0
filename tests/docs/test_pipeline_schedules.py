"""docs/pipeline-schedules.md shows figures that are measured; test_figures.py holds what its commands print."""

from spmdkit.parallel.schedule.builders import SCHEDULES, make_schedule
from spmdkit.parallel.schedule.csv_file import read_schedule
from spmdkit.parallel.schedule.timing import measure, peak_activations
from support.pages import ROOT, blocks

PAGE = ROOT / "docs" / "pipeline-schedules.md"


def test_the_table_is_measured():
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    shown = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    measured = []
    for name in SCHEDULES:
        schedule = make_schedule(name, 4, 8)
        peaks = " ".join(f"{peak:g}" for peak in peak_activations(schedule))
        measured.append([f"`{name}`", f"{measure(schedule).time:g}", f"{measure(schedule).bubble:.1%}", peaks])
    assert [[row[0], *row[3:]] for row in shown] == measured


def test_example_schedule_is_valid(tmp_path):
    (block,) = blocks(PAGE, "text")
    (tmp_path / "mine.csv").write_text(block.text, encoding="utf-8")
    assert read_schedule(tmp_path / "mine.csv").by_stage == make_schedule("1f1b", 2, 2).by_stage
