"""`spmdkit report` as it is typed."""

import json
import os
import shutil

import pytest
from runs import write_config
from spmdkit.launch.cli import main


def call(capsys, *words):
    capsys.readouterr()
    code = main(["report", *map(str, words)])
    return code, capsys.readouterr()


@pytest.mark.slow
def test_a_run_that_was_trained(tmp_path, capsys, monkeypatch):
    """Its report is renewed to the byte; a run that is under way says so; two runs are compared."""
    config = write_config(tmp_path, train={"steps": 4, "global_batch": 16}, checkpoint={"every": 2})
    assert main(["train", str(config)]) == 0
    run = tmp_path / "run"
    report = (run / "report.html").read_bytes()
    (run / "report.html").unlink()
    for given in (config, run, run / "checkpoints" / "4"):
        code, printed = call(capsys, given)
        assert code == 0
        assert printed.out.endswith("report.html\n")
        assert (run / "report.html").read_bytes() == report

    other = tmp_path / "other"
    shutil.copytree(run, other)
    facts = json.loads((other / "report.json").read_text())
    (other / "report.json").write_text(json.dumps(facts | {"finished": 0}))
    lines = (other / "metrics.jsonl").read_text().splitlines(keepends=True)
    (other / "metrics.jsonl").write_text("".join(lines[:2]) + lines[2][:20])
    assert call(capsys, other)[0] == 0
    assert "step 2 of 4" in (other / "report.html").read_text(encoding="utf-8")

    monkeypatch.chdir(tmp_path)
    code, printed = call(capsys, run, other, "--json")
    assert code == 0
    plain = json.loads(printed.out)
    assert [each["step"] for each in plain["runs"]] == [4, 2]
    assert plain["page"] == "compare.html"
    assert "They are not equally far: other 2" in page_of(tmp_path) or "run 4, other 2" in page_of(tmp_path)


def page_of(folder):
    return (folder / "compare.html").read_text(encoding="utf-8")


def test_a_folder_that_is_named_like_key_value(tmp_path, capsys, monkeypatch):
    """A word that contains = is a folder only if that folder exists."""
    for name in ("strategy=data", "strategy=fsdp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("train: {steps: 4}\n")
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 4, "loss": 2.0}\n')
    monkeypatch.chdir(tmp_path)
    code, printed = call(capsys, "strategy=data", "strategy=fsdp", "--json")
    assert (code, printed.err) == (0, "")
    assert [each["folder"] for each in json.loads(printed.out)["runs"]] == [
        str(tmp_path / "strategy=data"),
        str(tmp_path / "strategy=fsdp"),
    ]
    assert call(capsys, "strategy=data", "strategy=tensor")[0] == 2


@pytest.mark.parametrize("kind", ["link", "pipe", "script", "log"])
def test_rejects_a_target_that_is_not_a_page(kind, tmp_path, capsys):
    run, mine = tmp_path / "run", tmp_path / "mine.html"
    run.mkdir()
    (run / "config.yaml").write_text("train: {steps: 4}\n")
    (run / "metrics.jsonl").write_text('{"step": 4, "loss": 2.0}\n')
    mine.write_text("mine")
    target = {"script": tmp_path / "train.py", "log": run / "metrics.jsonl"}.get(kind, tmp_path / "out.html")
    if kind == "link":
        target.symlink_to(mine)
    elif kind == "pipe":
        os.mkfifo(target)
    elif kind == "script":
        target.write_text("import jax")
    before = os.lstat(target).st_ino
    code, printed = call(capsys, run, "--out", target)
    assert (code, printed.err.startswith(("error: ", "--out"))) == (2, True)
    assert "only a regular file can be replaced" in printed.err or "is a file, but not an HTML page" in printed.err
    assert (os.lstat(target).st_ino, mine.read_text()) == (before, "mine")
    for _ in range(2):  # a page is replaced
        assert call(capsys, run, "--out", tmp_path / "new.html")[0] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{run}"], "metrics.jsonl is missing"),
        (["{empty}"], "is no run, and no folder of checkpoints"),
        (["{empty}/none"], "There is no"),
        (["{run}", "{config}"], "is given twice"),
        (["{run}", "train.steps=3"], "train.steps=3: spmdkit report reads no config, so key=value changes nothing."),
    ],
)
def test_mistakes_are_one_message(untrained, tmp_path, words, said, capsys):
    """`untrained` has checkpoints, and has logged nothing."""
    (tmp_path / "empty").mkdir()
    places = {"run": untrained.parent / "run", "config": untrained, "empty": tmp_path / "empty"}
    code, printed = call(capsys, *(word.format(**places) for word in words))
    assert code == 2
    assert printed.err.startswith("error: ")
    assert said in printed.err
    assert "Traceback" not in printed.err
