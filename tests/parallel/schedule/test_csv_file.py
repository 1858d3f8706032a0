"""Schedules in files: what is written is read again, and whatever is wrong with a file is told with its place."""

from dataclasses import replace

import pytest
from spmdkit.parallel.schedule.builders import make_schedule
from spmdkit.parallel.schedule.csv_file import csv_text, read_schedule
from support.pipelines import TWO, parse


def test_csv_round_trip(tmp_path):
    for number, made in enumerate(
        [make_schedule("zbv", 3, 5), make_schedule("1f1b", 2, 4, recompute=True), make_schedule("gpipe", 1, 1)]
    ):
        path = tmp_path / f"{number}.csv"
        path.write_text(csv_text(made))
        assert read_schedule(path) == replace(made, name=path.name)
        assert make_schedule(str(path), made.stages, made.microbatches) == read_schedule(path)


def test_csv_of_a_spreadsheet(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_bytes('\ufeff# by hand\r\n"F0", F1,,B0,W0,B1,W1,,\r\n,F0,B0,F1,B1,W0,W1\r\n\r\n'.encode())
    schedule = read_schedule(path)
    assert [str(action) for _, _, action in schedule.actions()][:3] == ["F0", "F1", "F0"]
    assert (schedule.stages, schedule.microbatches, schedule.chunks, schedule.joint) == (2, 2, 1, False)
    assert set(map(len, schedule.by_stage)) == {9}


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("F0,X0,W0", ["line 1, stage 0, tick 1: 'X0' is not a valid action, such as F0"]),
        ("# joint: yes\nF0,B0,W0", ["line 1: joint is true or false, not 'yes'"]),
        ("# placment: v\nF0,B0,W0", ["Did you mean 'placement'?"]),
        ("F0,F9999999,B0", ["microbatches up to 9999999 through chunks up to 0 are more than its 3 ticks can contain"]),
        ("# nothing", ["lines of actions are missing"]),
        ("F0,W0,B0", ["stage 0, tick 1: W0 needs B0 at an earlier tick"]),
        ("# joint: 1\nF0,G0\nB,W0", ["joint", "line 2, stage 0, tick 1: 'G0'", "line 3, stage 1, tick 0: 'B'"]),
    ],
)
def test_rejects_invalid_csv(text, problems, tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"^{len(problems)} problems? in .*mine\.csv:\n") as caught:
        read_schedule(path)
    assert all(problem in str(caught.value) for problem in problems)


def test_rejects_csv_of_another_size(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(csv_text(parse(TWO)))
    with pytest.raises(ValueError, match="it is a schedule for 2 stages, not for 4\n  it is a schedule for 2 micro"):
        read_schedule(path, stages=4, microbatches=8, virtual=1)
    with pytest.raises(ValueError, match=r"add R0, R1, \.\.\. to it, and remove recompute"):
        make_schedule(str(path), 2, 2, recompute=True)


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"])
def test_rejects_unreadable_csv(content, tmp_path):
    path = tmp_path / "mine.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=r"Cannot read the schedule .*mine.csv: (No such file|it is not text)"):
        read_schedule(path)


def test_settings_and_idle_ticks_are_written_only_where_there_are_some():
    assert csv_text(parse("F0,,B0,W0\nF0,B0,W0")) == "F0,,B0,W0\nF0,B0,W0,\n"
    assert csv_text(parse(TWO, joint=True)).startswith("# joint: true\nF0,F1,,")
    assert csv_text(make_schedule("zbv", 2, 2)).startswith("# placement: v\nF0,")
