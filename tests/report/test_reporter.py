"""The report that a run writes."""

import os
from pathlib import Path

import pytest
from spmdkit.layouts.resolve import resolve
from spmdkit.mesh.device_mesh import DeviceMesh
from spmdkit.parallel.schedule.builders import make_schedule
from spmdkit.report import reporter
from spmdkit.report.reporter import RunReporter, step_costs
from spmdkit.report.run_facts import write_facts
from spmdkit.runtime.explain import Explanation
from support.reports import make_facts


@pytest.mark.parametrize(("microbatches", "drawn"), [(8, True), (2000, False)])
def test_draws_schedule_of_moderate_size(microbatches, drawn):
    mesh = DeviceMesh.simulated(2, data=2)
    sizes = {"bytes_per_device": {"batch": 1}, "compiled": {"total": 2}, "predicted": (), "found": ()}
    schedule = make_schedule("1f1b", 2, microbatches)
    explanation = Explanation(mesh="", axes={"data": 2}, table=resolve({}, mesh), schedule=schedule, **sizes)
    costs = step_costs(explanation)
    assert (costs.schedule is not None) == drawn
    assert costs.schedule_text.startswith(f"Pipeline schedule 1f1b, {microbatches:,} microbatches")
    assert (costs.held, costs.compiled) == ({"batch": 1}, {"total": 2})


@pytest.mark.parametrize(("finished", "reported"), [(None, True), (0, False), (11, False), (12, True)])
def test_report_written_before_the_end_is_unfinished(tmp_path: Path, finished, reported):
    """`spmdkit report` may renew it between the last checkpoint and the end."""
    report = tmp_path / "report.html"
    (tmp_path / "checkpoints" / "12").mkdir(parents=True)
    assert not RunReporter().is_finished(tmp_path, 12)
    report.write_text("")
    if finished is not None:
        write_facts(tmp_path, make_facts(finished=finished))
    assert RunReporter().is_finished(tmp_path, 12) == reported
    os.utime(report, (1, 1))
    assert not RunReporter().is_finished(tmp_path, 12), "the report is older than the checkpoint"


def test_training_starts_without_facts_if_they_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(reporter, "run_facts", lambda *_: make_facts())
    RunReporter().start(*[None] * 2, tmp_path / "missing")
    assert not list(tmp_path.iterdir())
