"""The table of a sweep, its JSON object and its page, of runs that were never trained."""

import json
from dataclasses import replace

import pytest
from left_runs import METRICS, some_facts
from runs import write_config
from spmdkit.launch.reporting.facts import write_facts as write_run_facts
from spmdkit.launch.sweeping.planning import Asked, plan
from spmdkit.launch.sweeping.telling import Told, as_text, plain, write_facts, write_page


@pytest.fixture
def told(tmp_path):
    """Three runs: one has trained, one will, one cannot."""
    config = write_config(tmp_path, train={"steps": 10, "global_batch": 16})
    trained, waiting, bad = plan(Asked(str(config), ["strategy=data,fsdp,tensr"]))
    leave(trained.folder)
    costs = {"devices": 8, "predicted_bytes": 2048, "collective_bytes": 100}
    return [
        Told(run=trained, status="finished", exit_code=0),
        Told(run=replace(waiting, costs=costs), status="waiting"),
        Told(run=bad, status="left out", exit_code=bad.exit_code, reason=bad.problem),
    ]


def leave(folder):
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("train: {steps: 10}\n")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in METRICS))
    write_run_facts(folder, some_facts())


def test_a_line_for_each_run_with_what_is_known_of_it(told, tmp_path):
    lines = as_text(plain(told, tmp_path)["runs"]).splitlines()
    heads = "run status step devices loss eval loss tokens/s time/step memory/device collectives/step"
    assert lines[0].split() == heads.replace("status ", "").split()
    assert lines[1].split("  ")[0] == "strategy=data"
    assert [cell.strip() for cell in lines[1].split("  ") if cell] == [
        *("strategy=data", "finished", "10", "8", "2.0000", "2.7500", "150", "375 ms", "7 B", "68 B"),
    ]
    assert lines[2].split() == [*["strategy=fsdp", "waiting", "–", "8", "–", "–", "–", "–"], "2", "KiB", "100", "B"]
    assert lines[3].split() == ["strategy=tensr", "left", "out", "–", "–", "–", "–", "–", "–", "–", "–"]
    assert lines[4].startswith("strategy=tensr: 1 problem on the command line")
    assert "strategy.tensr is not a key. Did you mean strategy.tensor?" in lines[4]
    assert len({len(line) for line in lines[:3]}) == 1


def test_a_column_that_nobody_fills_is_left_out(told, tmp_path):
    lines = as_text(plain(told[1:2], tmp_path)["runs"]).splitlines()
    assert lines[0].split() == ["run", "devices", "memory/device", "collectives/step"]


def test_what_is_written_is_what_is_printed(told, tmp_path):
    write_facts(told, tmp_path / "sweep")
    found = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert found == json.loads(json.dumps(plain(told, tmp_path / "sweep")))
    assert [(each["name"], each["status"], each["exit_code"]) for each in found["runs"]] == [
        ("strategy=data", "finished", 0),
        ("strategy=fsdp", "waiting", None),
        ("strategy=tensr", "left out", 2),
    ]
    assert found["runs"][0]["values"] == {"strategy": "data"}
    assert found["runs"][0]["loss"] == 2.0
    assert "loss" not in found["runs"][1]
    assert [path.name for path in (tmp_path / "sweep").iterdir()] == ["sweep.json"]


def test_a_page_needs_two_that_have_logged(told, tmp_path):
    assert write_page(told, tmp_path) is None
    leave(told[1].run.folder)
    page = write_page(told, tmp_path)
    assert page == tmp_path / "sweep.html"
    text = page.read_text(encoding="utf-8")
    assert "2 runs compared" in text
    assert text.count("strategy=fsdp") > 1
    assert "collectives of a step" in text
