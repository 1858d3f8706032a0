"""The command `spmdkit report`."""

import json
import os
import shutil

import pytest
from spmdkit.launch.cli import main
from support.runs import write_config


@pytest.mark.slow
def test_reports_trained_run(tmp_path, cli, monkeypatch):
    config = write_config(tmp_path, train={"steps": 4, "global_batch": 16}, checkpoint={"every": 2})
    assert main(["train", str(config)]) == 0
    run = tmp_path / "run"
    report = (run / "report.html").read_bytes()
    (run / "report.html").unlink()
    for given in (config, run, run / "checkpoints" / "4"):
        printed = cli(0, "report", given)
        assert printed.out.endswith("report.html\n")
        assert (run / "report.html").read_bytes() == report

    other = tmp_path / "other"
    shutil.copytree(run, other)
    facts = json.loads((other / "report.json").read_text())
    (other / "report.json").write_text(json.dumps(facts | {"finished": 0}))
    lines = (other / "metrics.jsonl").read_text().splitlines(keepends=True)
    (other / "metrics.jsonl").write_text("".join(lines[:2]) + lines[2][:20])
    cli(0, "report", other)
    assert "step 2 of 4" in (other / "report.html").read_text(encoding="utf-8")

    monkeypatch.chdir(tmp_path)
    printed = cli(0, "report", run, other, "--json")
    plain = json.loads(printed.out)
    assert [each["step"] for each in plain["runs"]] == [4, 2]
    assert plain["page"] == "compare.html"
    assert "run 4, other 2 steps" in (tmp_path / "compare.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", ["link", "pipe", "script", "log", "drawing"])
def test_rejects_a_target_that_is_not_a_page(kind, tmp_path, cli):
    run, mine = tmp_path / "run", tmp_path / "mine.html"
    run.mkdir()
    (run / "config.yaml").write_text("train: {steps: 4}\n")
    (run / "metrics.jsonl").write_text('{"step": 4, "loss": 2.0}\n')
    mine.write_text("mine")
    names = {"script": tmp_path / "train.py", "log": run / "metrics.jsonl", "drawing": tmp_path / "mesh.svg"}
    target = names.get(kind, tmp_path / "out.html")
    if kind == "link":
        target.symlink_to(mine)
    elif kind == "pipe":
        os.mkfifo(target)
    elif kind in ("script", "drawing"):
        target.write_text("import jax" if kind == "script" else "<svg></svg>")
    before = os.lstat(target).st_ino
    error = cli(2, "report", run, "--out", target).err
    assert error.startswith(("error: ", "--out"))
    assert "only a regular file can be replaced" in error or "is a file, but not an HTML page" in error
    assert (os.lstat(target).st_ino, mine.read_text()) == (before, "mine")
    for _ in range(2):  # a page is replaced
        cli(0, "report", run, "--out", tmp_path / "new.html")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{run}"], "metrics.jsonl is missing"),
        (["{empty}"], "is neither a run nor a directory of checkpoints"),
        (["{empty}/none"], "There is no"),
        (["{run}", "{config}"], "is given twice"),
        (["{run}", "train.steps=3"], "train.steps=3. Give the directory of a run"),
    ],
)
def test_rejects_invalid_runs(untrained, tmp_path, words, message, cli):
    """`untrained` has checkpoints, but no metrics."""
    (tmp_path / "empty").mkdir()
    places = {"run": untrained.parent / "run", "config": untrained, "empty": tmp_path / "empty"}
    printed = cli(2, "report", *(word.format(**places) for word in words))
    assert printed.err.startswith("error: ")
    assert message in printed.err
    assert "Traceback" not in printed.err
