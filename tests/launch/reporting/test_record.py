"""What the folder of a run says: all of it is read, and what is damaged or missing is named."""

import json

import pytest
from spmdkit.launch.reporting.record import read_run
from spmdkit.mesh.errors import UserError


def test_all_of_it_is_read(leave):
    folder = leave()
    (folder / "samples.jsonl").write_text('{"step": 5, "text": "a"}\n{"step": 10, "te')
    record = read_run(folder)
    assert (record.step, record.steps, record.samples) == (10, 10, [{"step": 5, "text": "a"}])
    assert record.goodput.share == 0.75
    assert record.course.seconds == 4.0
    assert record.facts.model == "mlp"


def test_only_config_and_metrics_have_to_be_there(leave):
    folder = leave(facts=False)
    (folder / "goodput.jsonl").unlink()
    record = read_run(folder)
    assert (record.facts, record.goodput, record.samples, record.course.stretches) == (None, None, [], [])


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("metrics.jsonl", None, "metrics.jsonl is missing: there is no metric to show. Wait until"),
        ("metrics.jsonl", "", "metrics.jsonl is empty"),
        (
            "metrics.jsonl",
            '{"step": 1}\nnonsense\n{"step": 2}\n',
            "line 2 is not a JSON object: 'nonsense'",
        ),
        ("metrics.jsonl", lines({"loss": 1}), "record 1: its step is None, after step 0; steps are whole numbers that"),
        ("metrics.jsonl", lines({"step": 2}, {"step": 2}), "record 2: its step is 2, after step 2"),
        ("config.yaml", None, "config.yaml is missing, which says what the run is"),
        ("config.yaml", "a: [1", "config.yaml cannot be read as the config of a run"),
        ("config.yaml", "- 1", "it holds no mapping of sections"),
        ("samples.jsonl", "x\n{}\n", "samples.jsonl line 1 is not a JSON object"),
    ],
)
def test_what_is_wrong_is_named(leave, name, text, said):
    folder = leave()
    (folder / name).unlink(missing_ok=True)
    if text is not None:
        (folder / name).write_text(text)
    with pytest.raises(UserError) as error:
        read_run(folder)
    assert said in str(error.value)
    assert str(folder) in str(error.value)
