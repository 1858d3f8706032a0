"""The record of a run: all files are read, corrupt files are named, and figures follow from the logs."""

import pytest
from spmdkit.mesh.errors import UserError
from spmdkit.report.run_record import final_figures, latest, read_run
from support.reports import METRICS, make_facts


def test_reads_all_files(leave):
    folder = leave()
    (folder / "samples.jsonl").write_text('{"step": 5, "text": "a"}\n{"step": 10, "te')
    record = read_run(folder)
    assert (record.step, record.steps, record.samples) == (30, 30, [{"step": 5, "text": "a"}])
    assert (record.goodput.share, record.course.seconds) == (0.75, 4.0)
    assert record.facts.model == "mlp"
    assert record.title == str(folder)


def test_requires_only_config_and_metrics(leave):
    folder = leave(facts=False, metrics=[{"step": 3, "loss": None}])
    (folder / "goodput.jsonl").unlink()
    record = read_run(folder)
    assert (record.facts, record.goodput, record.samples, record.course.stretches) == (None, None, [], [])
    assert record.status == "step 3 of 30"
    assert final_figures(record) == {"step": 3, "steps": 30}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("metrics.jsonl", None, "metrics.jsonl is missing: metrics to show are missing. Wait until"),
        ("metrics.jsonl", '{"step": 1}\nnonsense\n{"step": 2}\n', "line 2 is not a JSON object: 'nonsense'"),
        ("metrics.jsonl", '{"loss": 1}\n', "metrics.jsonl is empty"),
        ("config.yaml", None, "The config of the run cannot be read: [Errno 2] No such file"),
        ("config.yaml", "a: [1", "config.yaml is not a valid config of a run"),
        ("config.yaml", "- 1", "it is not a mapping of sections"),
    ],
)
def test_names_corrupt_file(leave, name, text, message):
    folder = leave()
    (folder / name).unlink(missing_ok=True)
    if text is not None:
        (folder / name).write_text(text)
    with pytest.raises(UserError) as error:
        read_run(folder)
    assert message in str(error.value)
    assert str(folder) in str(error.value)


def test_final_figures(leave):
    metrics = [*METRICS[:2], METRICS[2] | {"eval_loss": 3.5, "accuracy": 0.5}]
    facts = make_facts(measured={"one": 5, "other": 9})
    assert final_figures(read_run(leave(metrics=metrics, facts=facts))) == {
        "step": 30,
        "steps": 30,
        "tokens_per_second": 10000.0,
        "seconds_per_step": 0.25,
        "loss": 2.125,
        "eval_loss": 3.5,
        "best_eval_loss": 3.375,
        "best_eval_step": 20,
        "goodput": 0.75,
        "starts": 1,
        "seconds": 4.0,
        "parameters": 2464,
        "devices": 8,
        "predicted_bytes": 27 << 20,
        "measured_bytes": 9,
        "collective_bytes": (10 << 20) + 4608,
        "accuracy": 0.5,
    }


@pytest.mark.parametrize(
    ("finished", "status"), [(0, "step 30 of 30"), (30, "finished, 30 steps"), (29, "step 30 of 30")]
)
def test_status_is_finished_only_at_the_end(leave, finished, status):
    assert read_run(leave(facts=make_facts(finished=finished))).status == status


def test_status_without_a_number_of_steps(leave):
    assert read_run(leave(train={"steps": "x"}, facts=make_facts(finished=0))).status == "step 30"


def test_latest_skips_missing_values():
    assert latest([{"step": 10, "accuracy": 0.5}, {"step": 11, "accuracy": None}], "accuracy") == 0.5
    assert latest(METRICS, "perplexity") is None
