"""Run directories as a run leaves them."""

import json

import pytest
import yaml
from spmdkit.report.run_facts import write_facts
from support.reports import METRICS, make_facts


@pytest.fixture
def leave(tmp_path):
    """A function that writes a run directory."""

    def write(name="run", metrics=METRICS, facts=None, **config):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        tree = {"run": {"dir": str(folder), "seed": 0}, "train": {"steps": 30}, **config}
        (folder / "config.yaml").write_text(yaml.safe_dump(tree))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in metrics))
        lines = [{"kind": "begin", "seconds": 0.0, "at": 1.0}, {"kind": "start", "seconds": 1.0, "at": 1.0}]
        lines += [{"kind": "step", "seconds": 3.0, "at": 4.0, "from": 1, "to": 30}]
        (folder / "goodput.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        if facts is not False:
            write_facts(folder, facts or make_facts())
        return folder

    return write
