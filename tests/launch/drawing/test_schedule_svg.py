"""A schedule as a picture: every action where and as long as it runs, idle time and what is held beside it."""

from itertools import pairwise
from xml.etree import ElementTree

import pytest
from spmdkit.launch.cli import main
from spmdkit.launch.drawing.schedule_svg import LEFT, draw_svg, title
from spmdkit.parallel.schedule.builders import SCHEDULES, make_schedule

SVG = "{http://www.w3.org/2000/svg}"
SIZES = ("--stages", "4", "--microbatches", "8")


@pytest.mark.parametrize(("name", "virtual"), [(name, None) for name in SCHEDULES] + [("interleaved_1f1b", 4)])
def test_the_file_of_the_command(name, virtual, tmp_path, capsys):
    path = tmp_path / "drawn.svg"
    options = ["--virtual", str(virtual)] if virtual else []
    given = (name, *SIZES, *options, "--recompute", "--costs", "1,1.5,.5", "--svg", str(path))
    assert main(["schedule", *given]) == 0
    assert capsys.readouterr().out.endswith(f"Wrote {path}.\n")
    svg = ElementTree.parse(path).getroot()
    schedule = make_schedule(name, 4, 8, virtual=virtual, recompute=True)
    actions = [each for each in svg.iter(f"{SVG}rect") if each.get("class", "").startswith("action")]
    assert len(actions) == 4 * 4 * 8 * schedule.chunks
    assert all(each.find(f"{SVG}title") is not None for each in actions)
    width = float(svg.get("width", 0))
    assert all(float(each.get("x", -1)) + float(each.get("width", 0)) <= width for each in actions)


def test_it_needs_no_other_file():
    text = draw_svg(make_schedule("zbv", 4, 8))
    assert "prefers-color-scheme: dark" in text
    assert text.count("http") == 1  # the namespace
    assert ">F0.1: forward of microbatch 0, chunk 1; tick 7, time 3.5<" in text


def drawn(schedule, costs):
    """The actions of each stage as (letter, start, end) in pixels, top stage first."""
    stages: dict[float, list] = {}
    for each in ElementTree.fromstring(draw_svg(schedule, costs)).iter(f"{SVG}rect"):
        kind, _, letter = each.get("class", "").partition(" ")
        if kind == "action":
            start = float(each.get("x", 0))
            stages.setdefault(float(each.get("y", 0)), []).append((letter, start, start + float(each.get("width", 0))))
    return [sorted(stages[y], key=lambda action: action[1]) for y in sorted(stages)]


def test_an_action_is_as_wide_as_it_lasts():
    """Costs of 1, 2 and 1: a backward to the input is twice as wide, and nothing lies over another."""
    schedule = make_schedule("1f1b", 2, 3)
    stages = drawn(schedule, (1.0, 2.0, 1.0))
    assert [[letter for letter, *_ in stage] for stage in stages] == [
        [str(action)[0] for action in column if action] for column in schedule.by_stage
    ]
    widths = {letter: {round(end - start) for found, start, end in stages[0] if found == letter} for letter in "FBW"}
    (forward,), (backward,), (weight,) = widths.values()
    assert backward == pytest.approx(2 * forward, abs=2)
    assert weight == forward
    for stage in stages:
        assert stage[0][1] >= LEFT
        assert all(end <= start for (_, _, end), (_, start, _) in pairwise(stage))


def test_what_is_said_in_it():
    schedule = make_schedule("interleaved_1f1b", 2, 4, virtual=2)
    assert title(schedule) == "interleaved_1f1b: 2 stages of 2 chunks, 4 microbatches"
    text = draw_svg(schedule)
    assert ">stage 1</text>" in text
    assert ">stage 2</text>" not in text
    assert title(make_schedule("gpipe", 2, 4)) == "gpipe: 2 stages, 4 microbatches"
