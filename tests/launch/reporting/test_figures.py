"""The figures of a whole run, from its logs."""

from dataclasses import replace

import pytest
from left_runs import METRICS, some_facts
from spmdkit.launch.reporting.facts import write_facts
from spmdkit.launch.reporting.figures import final_figures, last, summary_of
from spmdkit.launch.reporting.record import read_run


def test_final_figures(leave):
    assert final_figures(read_run(leave())) == {
        "step": 10,
        "steps": 10,
        "tokens_per_second": 150.0,
        "seconds_per_step": 0.375,
        "loss": 2.0,
        "eval_loss": 2.75,
        "best_eval_loss": 2.5,
        "best_eval_step": 5,
        "goodput": 0.75,
        "starts": 1,
        "seconds": 4.0,
        "parameters": 128,
        "devices": 8,
        "predicted_bytes": 7,
        "collective_bytes": 64 + 4,
        "accuracy": 0.5,
    }


def test_rows_take_the_place_of_tokens(leave):
    found = final_figures(read_run(leave(metrics=[record | {"rows_per_second": 70.0} for record in METRICS])))
    assert found["rows_per_second"] == 70.0
    assert "tokens_per_second" not in found


def test_what_is_not_known_is_left_out(leave):
    folder = leave(facts=False, metrics=[{"step": 3, "loss": None}])
    (folder / "goodput.jsonl").unlink()
    assert final_figures(read_run(folder)) == {"step": 3, "steps": 10}
    assert summary_of(read_run(folder)) == {"title": str(folder), "status": "step 3 of 10", "steps": 3}


def test_the_time_of_steps_counts_each_of_them(leave):
    summary = summary_of(read_run(leave()))
    assert summary["seconds"] == pytest.approx(5 * 0.5 + 5 * 0.25)
    assert (summary["eval_loss"], summary["model"], summary["data"]) == (2.75, "mlp", "digits")


@pytest.mark.parametrize(
    ("finished", "status"), [(0, "step 10 of 10"), (10, "finished, 10 steps"), (9, "step 10 of 10")]
)
def test_a_run_is_finished_when_it_says_so(leave, finished, status):
    folder = leave()
    write_facts(folder, replace(some_facts(), finished=finished, figures={"bigram_loss": 2.5}))
    summary = summary_of(read_run(folder))
    assert (summary["status"], summary["bigram_loss"]) == (status, 2.5)


def test_the_last_that_is_a_number():
    assert last([*METRICS, {"step": 11, "accuracy": None}], "accuracy") == 0.5
    assert last(METRICS, "perplexity") is None
