import csv
import gzip
import json

import pytest
from spmdkit.mesh.errors import UserError
from spmdkit.training.callbacks.recording import SAMPLES, CSVLog, Profile, Samples
from support.training import play


def rows(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_csv_has_a_line_for_each_record(tmp_path):
    play(CSVLog(), losses=[0.125], every=3, steps=4, folder=tmp_path)
    found = rows(tmp_path)
    assert [row["step"] for row in found] == ["1", "2", "3", "4"]
    assert [float(row["loss"]) for row in found] == [1, 2, 3, 4]
    assert [row["eval_loss"] for row in found] == ["", "", "0.125", ""]


def test_csv_drops_lines_of_repeated_steps(tmp_path):
    play(CSVLog(), losses=[0.125], every=3, steps=5, folder=tmp_path)
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("6,6.0")  # killed in the midst of a line
    play(CSVLog(), start=6, steps=8, folder=tmp_path)
    assert [row["step"] for row in rows(tmp_path)] == ["1", "2", "3", "4", "5", "7", "8"]
    play(CSVLog(), start=2, steps=4, folder=tmp_path)
    assert [row["step"] for row in rows(tmp_path)] == ["1", "2", "3", "4"]
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(
    "content", [b"name,age\nada,36\n", b"step,loss\n1,2\nx,3\n", b"one line of notes", b"notes,\n", b"\xff\n"]
)
def test_keeps_a_file_that_is_not_a_table_of_metrics(content, tmp_path):
    """The check comes first, before any callback is called."""
    (tmp_path / "metrics.csv").write_bytes(content)
    called = []
    with pytest.raises(UserError, match=r"metrics.csv is not a table of metrics"):
        play(type("First", (), {"on_train_begin": lambda self, run: called.append(run)})(), CSVLog(), folder=tmp_path)
    assert (tmp_path / "metrics.csv").read_bytes() == content
    assert not called


class Writing:
    """Makes the run one that writes text, before samples look at it."""

    def prepare(self, run):
        run.generate = lambda prompt, length, temperature: f"{prompt}, {length} at step {run.step}"


def sampled(folder, **options):
    return play(Writing(), Samples(every=2, prompt="so", length=3), losses=[1.0], every=2, folder=folder, **options)


def kept(folder):
    return [json.loads(line) for line in (folder / SAMPLES).read_text().splitlines()]


def test_samples_every_few_evaluations(tmp_path):
    played = sampled(tmp_path, steps=10)
    assert kept(tmp_path) == [{"step": step, "text": f"so, 3 at step {step}"} for step in (4, 8)]
    assert played.said == [f"Step {step} writes:\n\nso, 3 at step {step}\n" for step in (4, 8)]


def test_samples_resume_and_drop_repeated_steps(tmp_path):
    notes = sampled(tmp_path, steps=10, saves=(6,)).saved[6]
    sampled(tmp_path, start=6, steps=12, notes=notes)
    assert [each["step"] for each in kept(tmp_path)] == [4, 8, 12]


def traced_steps(folder):
    (file,) = folder.rglob("perfetto_trace.json.gz")
    with gzip.open(file) as text:
        events = json.load(text)["traceEvents"]
    return sorted(int(event["args"]["step_num"]) for event in events if event.get("name") == "train")


@pytest.mark.parametrize(
    ("options", "steps", "start", "expected"),
    [
        pytest.param({"start": 3, "steps": 2}, 12, 0, [3, 4], id="a window"),
        pytest.param({"start": 3, "steps": 5}, 4, 0, [3, 4], id="the run is shorter"),
        pytest.param({"start": 3, "steps": 3}, 12, 4, [5], id="a run that goes on within it"),
    ],
)
def test_traces_the_steps_of_the_window(options, steps, start, expected, tmp_path):
    played = play(Profile(**options), steps=steps, start=start, folder=tmp_path)
    assert traced_steps(tmp_path / "profile") == expected
    assert len(list(tmp_path.rglob("*.xplane.pb"))) == 1
    assert len(played.said) == (steps == 12)


def test_skips_a_window_before_the_resume(tmp_path):
    play(Profile(start=3, steps=2), start=5, folder=tmp_path)
    assert not (tmp_path / "profile").exists()


def test_rejects_a_start_of_zero():
    with pytest.raises(UserError, match=r"Profile.start=0 must be at least 1"):
        Profile(start=0)
    with pytest.raises(UserError, match=r"CSVLog.path=3 must be a string"):
        CSVLog(path=3)  # type: ignore[arg-type]
