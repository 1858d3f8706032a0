import csv

import pytest
from play import play
from spmdkit.mesh.errors import UserError
from spmdkit.training.callbacks.csv_log import CSVLog


def rows(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_line_for_each_record(tmp_path):
    play(CSVLog(), losses=[0.125], every=3, steps=4, folder=tmp_path)
    found = rows(tmp_path)
    assert [row["step"] for row in found] == ["1", "2", "3", "4"]
    assert [float(row["loss"]) for row in found] == [1, 2, 3, 4]
    assert [row["eval_loss"] for row in found] == ["", "", "0.125", ""]


def test_lines_of_steps_that_are_trained_again_are_dropped(tmp_path):
    play(CSVLog(), losses=[0.125], every=3, steps=5, folder=tmp_path)
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("6,6.0")  # killed in the midst of a line
    play(CSVLog(), start=2, steps=4, folder=tmp_path)
    assert [row["step"] for row in rows(tmp_path)] == ["1", "2", "3", "4"]
    assert not list(tmp_path.glob("*.new"))


@pytest.mark.parametrize("content", [b"name,age\nada,36\n", b"one line of notes", b"notes,\n", b"\xff\n"])
def test_keeps_a_file_that_is_not_a_table_of_metrics(content, tmp_path):
    """The check comes first, before any callback is called."""
    (tmp_path / "metrics.csv").write_bytes(content)
    called = []
    with pytest.raises(UserError, match=r"metrics.csv is not a table of metrics"):
        play(type("First", (), {"on_train_begin": lambda self, run: called.append(run)})(), CSVLog(), folder=tmp_path)
    assert (tmp_path / "metrics.csv").read_bytes() == content
    assert not called
