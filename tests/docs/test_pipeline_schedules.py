"""docs/pipeline-schedules.md shows what the commands print, and figures that are measured."""

import shlex
from pathlib import Path

import pytest
from pages import ROOT, blocks
from spmdkit.launch.cli import main
from spmdkit.parallel.schedule.builders import SCHEDULES, make_schedule
from spmdkit.parallel.schedule.csv_file import read_schedule
from spmdkit.parallel.schedule.timing import measure, peak_activations

PAGE = ROOT / "docs" / "pipeline-schedules.md"


@pytest.mark.parametrize("block", blocks(PAGE, "console"), ids=lambda block: block.text.splitlines()[0])
def test_commands_print_what_is_shown(block, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "110")
    for shown in block.text.removeprefix("$ ").split("\n$ "):
        line, _, output = shown.partition("\n")
        program, *words = shlex.split(line)
        if program == "cat":  # a file of the reader's
            Path(words[0]).write_text(output, encoding="utf-8")
        else:
            main(words)
            printed = capsys.readouterr()
            assert (printed.out + printed.err).strip() == output.strip()


def test_the_table_is_measured():
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    shown = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    measured = []
    for name in SCHEDULES:
        schedule = make_schedule(name, 4, 8)
        peaks = " ".join(f"{peak:g}" for peak in peak_activations(schedule))
        measured.append([f"`{name}`", f"{measure(schedule).time:g}", f"{measure(schedule).bubble:.1%}", peaks])
    assert [[row[0], *row[3:]] for row in shown] == measured


def test_the_file_can_be_read(tmp_path):
    (block,) = blocks(PAGE, "text")
    (tmp_path / "mine.csv").write_text(block.text, encoding="utf-8")
    assert read_schedule(tmp_path / "mine.csv").by_stage == make_schedule("1f1b", 2, 2).by_stage
