"""`spmdkit schedule` and its drawings: every action is drawn where it runs, and invalid arguments are reported."""

import json
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from rich.console import Console
from spmdkit.mesh.exit_codes import INVALID_INPUT
from spmdkit.parallel.schedule.builders import SCHEDULES, make_schedule
from spmdkit.parallel.schedule.csv_file import read_schedule
from spmdkit.report.schedule_drawing import LEFT, draw_svg, draw_text

SVG = "{http://www.w3.org/2000/svg}"
SIZES = ("--stages", "4", "--microbatches", "8")


def test_draws_text(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli(0, "schedule", "1f1b", "--stages", "2", "--microbatches", "3").out == (
        "1f1b: 2 stages, 3 microbatches\n"
        "\n"
        "tick     0     2     4     6     8     10\n"
        "stage 0  F0 F1 .  .  B0 W0 F2 B1 W1 .  B2 W2\n"
        "stage 1  .  F0 B0 W0 F1 B1 W1 F2 B2 W2 .  .\n"
        "\n"
        "F forward  B backward to input  W backward to weights  . idle\n"
        "\n"
        "time              12     12 ticks, each as long as its slowest action\n"
        "ideal time        12     the same order, if no stage waits for a tick to end\n"
        "bubble            25.0%  of the time, stages are idle\n"
        "peak activations  2 1    microbatches, stage by stage\n"
    )


@pytest.mark.parametrize(("name", "width"), [*((name, 80) for name in SCHEDULES), ("1f1b", 200)])
def test_text_fits_the_terminal_and_is_complete(name, width):
    schedule = make_schedule(name, 4, 4, recompute=True)
    lines = draw_text(schedule, width).plain.splitlines()
    assert max(map(len, lines)) <= width
    for stage in range(4):
        words = [word for line in lines if line.startswith(f"stage {stage} ") for word in line.split()[2:]]
        assert words == [str(action or ".") for action in schedule.by_stage[stage]]


def test_terminal_gets_colors():
    console = Console(force_terminal=True, color_system="truecolor", width=80)
    with console.capture() as capture:
        console.print(draw_text(make_schedule("zb_h1", 2, 2), 80))
    assert "\033[37;48;2;47;111;222mF0\033[0m" in capture.get()


def test_prints_json(cli):
    figures = json.loads(cli(0, "schedule", "1f1b", *SIZES, "--json").out)
    expected = {"name": "1f1b", "stages": 4, "microbatches": 8, "virtual": 1, "ticks": 33, "time": 33}
    expected |= {"ideal_time": 33, "bubble": pytest.approx(9 / 33)}
    assert figures == {**expected, "peak_activations": [4, 3, 2, 1], "peak_inputs": [0, 0, 0, 0]}


def test_costs_include_waiting_for_the_slowest_action(cli):
    figures = json.loads(cli(0, "schedule", "1f1b", *SIZES, "--costs", "1,2,1.5", "--json").out)
    assert (figures["ticks"], figures["ideal_time"]) == (33, (8 + 4 - 1) * 4.5)
    assert figures["time"] > 1.2 * figures["ideal_time"]


def test_reads_csv_file(tmp_path, cli):
    path = tmp_path / "mine.csv"
    cli(0, "schedule", "zb_h1", *SIZES, "--csv", path)
    figures = json.loads(cli(0, "schedule", path, "--json").out)
    assert figures["name"] == "mine.csv"
    assert (figures["stages"], figures["microbatches"], figures["time"]) == (4, 8, 27)
    assert read_schedule(path).by_stage == make_schedule("zb_h1", 4, 8).by_stage


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1fb1",), "Unknown schedule '1fb1'; known: gpipe, 1f1b, interleaved_1f1b, zb_h1, zbv. Did you mean '1f1b'?"),
        (("1f1b", "--stages", "4"), "schedule 1f1b needs --stages and --microbatches; for example"),
        (("zbv", *SIZES, "--virtual", "3"), "zbv has 2 chunks on each stage, not 3."),
        (("nowhere.csv",), "Cannot read the schedule nowhere.csv: No such file or directory."),
        (("nowhere.csv", "--recompute"), "nowhere.csv lists its own recomputations: add R0, R1, ... to it, and"),
        (("1f1b", *SIZES, "--svg", "nowhere/a.svg"), "nowhere/a.svg: No such file or directory."),
    ],
)
def test_rejects_invalid_arguments(arguments, message, tmp_path, monkeypatch, cli):
    monkeypatch.chdir(tmp_path)
    captured = cli(INVALID_INPUT, "schedule", *arguments)
    assert captured.err.startswith(f"error: {message}")
    assert "Traceback" not in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(("name", "virtual"), [(name, None) for name in SCHEDULES] + [("interleaved_1f1b", 4)])
def test_svg_has_every_action(name, virtual, tmp_path, cli):
    path = tmp_path / "drawn.svg"
    options = ["--virtual", str(virtual)] if virtual else []
    given = (name, *SIZES, *options, "--recompute", "--costs", "1,1.5,.5", "--svg", str(path))
    assert cli(0, "schedule", *given).out.endswith(f"Wrote {path}.\n")
    assert "costs 1, 1.5, 0.5" in path.read_text(encoding="utf-8")
    svg = ElementTree.parse(path).getroot()
    schedule = make_schedule(name, 4, 8, virtual=virtual, recompute=True)
    actions = [each for each in svg.iter(f"{SVG}rect") if each.get("class", "").startswith("action")]
    assert len(actions) == 4 * 4 * 8 * schedule.chunks
    assert all(each.find(f"{SVG}title") is not None for each in actions)
    width = float(svg.get("width", 0))
    assert all(float(each.get("x", -1)) + float(each.get("width", 0)) <= width for each in actions)


def test_svg_needs_no_other_file():
    text = draw_svg(make_schedule("zbv", 4, 8))
    assert "prefers-color-scheme: dark" in text
    assert text.count("http") == 1  # the namespace
    assert ">F0.1: forward of microbatch 0, chunk 1; tick 7, time 3.5<" in text
    assert ">zbv: 4 stages of 2 chunks, 8 microbatches</text>" in text
    assert text.count(">stage ") == 4
    assert text.count(">holds 4<") == 4  # 8 activations of half a stage each
    rises_and_falls = draw_svg(make_schedule("gpipe", 1, 4)).partition('d="M')[2].partition('Z"')[0]
    assert rises_and_falls.count("V") == 1 + 4 + 3


def drawn(schedule, costs):
    """The actions of each stage as (letter, start, end) in pixels, top stage first."""
    stages: dict[float, list] = {}
    for each in ElementTree.fromstring(draw_svg(schedule, costs)).iter(f"{SVG}rect"):
        kind, _, letter = each.get("class", "").partition(" ")
        if kind == "action":
            start = float(each.get("x", 0))
            stages.setdefault(float(each.get("y", 0)), []).append((letter, start, start + float(each.get("width", 0))))
    return [sorted(stages[y], key=lambda action: action[1]) for y in sorted(stages)]


def test_svg_action_is_as_wide_as_it_lasts():
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
    figures = "time 18 · ideal 16 · 33.3% idle · at most 2 microbatches of activations on a stage · costs 1, 2, 1"
    assert figures in draw_svg(schedule, (1.0, 2.0, 1.0))
    for stage in stages:
        assert stage[0][1] >= LEFT
        assert all(end <= start for (_, _, end), (_, start, _) in pairwise(stage))
