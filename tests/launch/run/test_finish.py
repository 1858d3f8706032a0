"""The end of a run: verdict, sample and report."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from runs import metrics, write_config, write_language_config
from spmdkit.configs import load_config
from spmdkit.data import bigram_loss
from spmdkit.launch.cli import main
from spmdkit.launch.reporting.facts import facts_of, write_facts
from spmdkit.launch.run.build import build
from spmdkit.launch.run.explain import Explanation
from spmdkit.launch.run.finish import _verdict, _yardsticks, is_reported, step_costs
from spmdkit.layouts.resolve import resolve
from spmdkit.mesh.device_mesh import DeviceMesh
from spmdkit.parallel.schedule.builders import make_schedule
from spmdkit.training.report.costs import StepCosts

SHORT = {"train": {"steps": 2, "global_batch": 16}, "checkpoint": {"every": 0}}


@pytest.mark.slow
def test_a_language_model_is_judged_and_writes(tmp_path, capsys):
    sample = {"length": 12, "prompt": "the mesh"}
    assert main(["train", str(write_language_config(tmp_path, sample=sample, **SHORT))]) == 0
    printed = capsys.readouterr().out
    last = metrics(tmp_path / "run")[-1]
    assert f"Evaluation loss {last['eval_loss']:.4f} after 2 steps." in printed
    assert "of a bigram model fitted on the same training text." in printed
    text = printed.partition("A sample of what it writes:\n\n")[2]
    assert text.startswith("the mesh")
    report = tmp_path / "run" / "report.html"
    assert f"Wrote {report}" in printed
    assert "the mesh" in report.read_text(encoding="utf-8")
    assert "blocks/attention/query" in report.read_text(encoding="utf-8")


@pytest.mark.parametrize("batches", [1, 3, 0])
def test_the_bigram_model_is_measured_on_the_rows_that_the_model_is(batches, tmp_path):
    """`eval.batches` batches of `train.global_batch` rows; 0 is the whole split."""
    config = write_language_config(tmp_path, **SHORT | {"eval": {"every": 0, "batches": batches}})
    built = build(load_config(config))
    measured = built.splits.evaluation
    rows = batches * 16 or len(measured)
    assert rows <= len(measured)
    few = [measured[index] for index in range(rows)]
    expected = bigram_loss(built.splits.train, Rows(few), 256)
    assert dict(_yardsticks(built)) == {"bigram_loss": pytest.approx(expected, rel=1e-12)}


class Rows(list):
    """Examples as a source."""


def test_a_classifier_has_no_sample_and_no_bigrams(tmp_path, capsys):
    assert main(["train", str(write_config(tmp_path, **SHORT, **{"sample": {"length": 12}}))]) == 0
    printed = capsys.readouterr().out
    assert "Evaluation loss" in printed
    assert "A sample of" not in printed
    assert "bigram" not in printed
    report = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "exactly as the strategies predict" in report
    assert report.count("<span>memory per device</span>") == 1


def test_without_an_evaluation_split(tmp_path, capsys):
    data = {"source": "synthetic", "eval_fraction": 0}
    assert main(["train", str(write_config(tmp_path, data=data, **SHORT))]) == 0
    assert "Evaluation loss" not in capsys.readouterr().out
    assert "eval_loss" not in metrics(tmp_path / "run")[-1]
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.parametrize(("microbatches", "drawn"), [(8, True), (2000, False)])
def test_a_schedule_is_drawn_where_it_is_not_too_large(microbatches, drawn):
    mesh = DeviceMesh.simulated(2, data=2)
    explanation = Explanation(
        mesh="",
        axes={"data": 2},
        table=resolve({}, mesh),
        bytes_per_device={"batch": 1},
        compiled={"total": 2},
        predicted=(),
        found=(),
        schedule=make_schedule("1f1b", 2, microbatches),
    )
    costs = step_costs(explanation)
    assert costs.schedule_svg.startswith("<svg") == drawn
    assert costs.schedule_text.startswith(f"Pipeline schedule 1f1b, {microbatches:,} microbatches")
    assert (costs.held, costs.compiled) == ({"batch": 1}, {"total": 2})


@pytest.mark.parametrize(("bigram", "side"), [(2.0, "below"), (1.5, "NOT below"), (1.2, "NOT below")])
def test_verdict(bigram, side):
    summary = {"eval_loss": 1.5, "steps": 7, "bigram_loss": bigram}
    assert list(_verdict(summary)) == [
        "Evaluation loss 1.5000 after 7 steps.",
        f"That is {side} the {bigram:.4f} of a bigram model fitted on the same training text.",
    ]


def test_a_report_older_than_the_checkpoint_is_of_an_earlier_part(tmp_path: Path):
    checkpoint, report = tmp_path / "12", tmp_path / "report.html"
    checkpoint.mkdir()
    assert not is_reported(tmp_path, checkpoint)
    report.write_text("")
    assert is_reported(tmp_path, checkpoint)
    os.utime(report, (1, 1))
    assert not is_reported(tmp_path, checkpoint)


@pytest.mark.parametrize(("finished", "reported"), [(0, False), (11, False), (12, True)])
def test_a_report_that_a_command_has_written_is_no_end(tmp_path: Path, finished, reported):
    """`spmdkit report` may renew it between the last checkpoint and the end."""
    (tmp_path / "12").mkdir()
    (tmp_path / "report.html").write_text("")
    costs = StepCosts(held={}, compiled={}, predicted=(), found=())
    facts = facts_of("mlp", 1, "digits", resolve({}, DeviceMesh.simulated(2, data=2)), costs)
    write_facts(tmp_path, replace(facts, finished=finished))
    assert is_reported(tmp_path, tmp_path / "12") == reported
