"""`spmdkit schedule` draws, times and weighs a schedule, and says what is wrong with what it was given."""

import json
import subprocess
import sys

import pytest
from rich.console import Console
from spmdkit.launch.cli import main
from spmdkit.launch.drawing.schedule import drawing
from spmdkit.parallel.schedule.builders import SCHEDULES, make_schedule
from spmdkit.parallel.schedule.csv_file import read_schedule
from spmdkit.training.ending.exits import USER_MISTAKE

SIZES = ("--stages", "4", "--microbatches", "8")


def printed(capsys, *arguments: str) -> str:
    assert main(["schedule", *arguments]) == 0
    return capsys.readouterr().out


def test_the_drawing(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert printed(capsys, "1f1b", "--stages", "2", "--microbatches", "3") == (
        "1f1b: 2 stages, 3 microbatches\n"
        "\n"
        "tick     0     2     4     6     8     10\n"
        "stage 0  F0 F1 .  .  B0 W0 F2 B1 W1 .  B2 W2\n"
        "stage 1  .  F0 B0 W0 F1 B1 W1 F2 B2 W2 .  .\n"
        "\n"
        "F forward  B backward to input  W backward to weights  . idle\n"
        "\n"
        "time              12     12 ticks, each as long as its slowest action\n"
        "ideal time        12     the same order, where no stage waits for a tick to end\n"
        "bubble            25.0%  of the time, stages are idle\n"
        "peak activations  2 1    microbatches, stage by stage\n"
    )


@pytest.mark.parametrize("width", [80, 100, 200])
@pytest.mark.parametrize("name", SCHEDULES)
def test_drawings_fit_the_terminal_and_lose_nothing(name, width):
    schedule = make_schedule(name, 4, 4, recompute=True)
    lines = drawing(schedule, width).plain.splitlines()
    assert max(map(len, lines)) <= width
    for stage in range(4):
        words = [word for line in lines if line.startswith(f"stage {stage} ") for word in line.split()[2:]]
        assert words == [str(action or ".") for action in schedule.by_stage[stage]]


def test_a_long_drawing_leaves_out_its_middle():
    text = drawing(make_schedule("1f1b", 4, 64), 80).plain
    assert len(text.splitlines()) < 40
    assert "... ticks 51 to 186; --svg FILE draws them all\n" in text
    assert "tick     0 " in text
    assert "W63" in text


def test_a_terminal_gets_colours():
    console = Console(force_terminal=True, color_system="truecolor", width=80)
    with console.capture() as capture:
        console.print(drawing(make_schedule("zb_h1", 2, 2), 80))
    assert "\033[37;48;2;47;111;222mF0\033[0m" in capture.get()


def test_json(capsys):
    figures = json.loads(printed(capsys, "1f1b", *SIZES, "--json"))
    assert figures == {
        "name": "1f1b",
        "stages": 4,
        "microbatches": 8,
        "virtual": 1,
        "ticks": 33,
        "time": 33,
        "ideal_time": 33,
        "bubble": pytest.approx(9 / 33),
        "peak_activations": [4, 3, 2, 1],
        "peak_inputs": [0, 0, 0, 0],
    }


def test_costs_show_what_lock_step_costs(capsys):
    figures = json.loads(printed(capsys, "1f1b", *SIZES, "--costs", "1,2,1.5", "--json"))
    assert figures["ticks"] == 33
    assert figures["ideal_time"] == (8 + 4 - 1) * 4.5
    assert figures["time"] > 1.2 * figures["ideal_time"]


def test_a_file_of_your_own(tmp_path, capsys):
    path = tmp_path / "mine.csv"
    printed(capsys, "zb_h1", *SIZES, "--csv", str(path))
    figures = json.loads(printed(capsys, str(path), "--json"))
    assert figures["name"] == "mine.csv"
    assert (figures["stages"], figures["microbatches"], figures["time"]) == (4, 8, 27)
    assert read_schedule(path).by_stage == make_schedule("zb_h1", 4, 8).by_stage


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1fb1",), "Unknown schedule '1fb1'; known: gpipe, 1f1b, interleaved_1f1b, zb_h1, zbv. Did you mean '1f1b'?"),
        (("1f1b",), "schedule 1f1b needs --stages and --microbatches; for example --stages 4 --microbatches 8."),
        (("1f1b", "--stages", "4"), "schedule 1f1b needs --microbatches; for example"),
        (("1f1b", "--stages", "4", "--microbatches", "3"), "strategy.pipe.microbatches=3 is fewer than strategy.pipe."),
        (("zbv", *SIZES, "--virtual", "3"), "zbv has 2 chunks on each stage, not 3."),
        (("1f1b", *SIZES, "--costs", "1,x,1"), "--costs 1,x,1 are not numbers; give those of forward, backward to"),
        (("1f1b", *SIZES, "--costs", "1,2"), "costs 1,2 are not three positive numbers."),
        (("nowhere.csv",), "Cannot read the schedule nowhere.csv: No such file or directory."),
        (("nowhere.csv", "--recompute"), "nowhere.csv itself says what is recomputed: put R0, R1, ... in it, and"),
        (("1f1b", *SIZES, "--svg", "nowhere/a.svg"), "Cannot write nowhere/a.svg: No such file or directory."),
    ],
)
def test_mistakes(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["schedule", *arguments]) == USER_MISTAKE
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {message}")
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_it_opens_no_device():
    program = """if True:
        from spmdkit.launch.cli import main
        from spmdkit.mesh import backend_started
        assert main(["schedule", "zbv", "--stages", "2", "--microbatches", "4"]) == 0
        assert not backend_started()
    """
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=60)
