"""What `spmdkit report` writes and says."""

import json

import pytest
from spmdkit.launch.reporting.record import read_run
from spmdkit.launch.reporting.tell import told, written
from spmdkit.mesh.errors import UserError


def test_one_run(leave, tmp_path):
    record = read_run(leave())
    page = written([record], None, tmp_path / "compare.html")
    assert page == record.folder / "report.html"
    assert page.is_file()
    said = told([record], page)
    assert said.text.splitlines() == [
        f"{record.folder}: step 10 of 10, training loss 2.0000, evaluation loss 2.7500",
        f"Wrote {page}",
    ]


def test_several_runs(leave, tmp_path):
    records = [read_run(leave("a")), read_run(leave("b", facts=False, train={"steps": 20}))]
    page = written(records, None, tmp_path / "compare.html")
    assert page == tmp_path / "compare.html"
    said = told(records, page)
    assert "1 key of their configs differ: train.steps" in said.text
    assert f"{tmp_path / 'b'} has no report.json" in said.text
    plain = json.loads(json.dumps(said.plain))
    assert plain["config_differences"] == {"train.steps": [10, 20]}
    assert [(run["folder"], run["step"], run["eval_loss"]) for run in plain["runs"]] == [
        (str(tmp_path / "a"), 10, 2.75),
        (str(tmp_path / "b"), 10, 2.75),
    ]


@pytest.mark.parametrize(("out", "said"), [("", "is a folder"), ("no/such/page.html", "cannot be written: No such")])
def test_a_page_that_cannot_be_written(leave, tmp_path, out, said):
    with pytest.raises(UserError, match=said):
        written([read_run(leave())], tmp_path / out, tmp_path / "compare.html")
