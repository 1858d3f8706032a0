"""Lets the tests of this folder import `left_runs`, and leaves folders of runs as a run does."""

import json
import sys
from pathlib import Path

import pytest
import yaml

sys.path[:0] = [str(Path(__file__).parent)]

from left_runs import METRICS, some_facts  # noqa: E402  (found there)
from spmdkit.launch.reporting.facts import write_facts  # noqa: E402


@pytest.fixture
def leave(tmp_path):
    """A function that leaves a run in a folder of a name."""

    def write(name="run", metrics=METRICS, facts=True, **config):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        tree = {"run": {"dir": str(folder), "seed": 0}, "train": {"steps": 10}, **config}
        (folder / "config.yaml").write_text(yaml.safe_dump(tree))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in metrics))
        lines = [{"kind": "begin", "seconds": 0.0, "at": 1.0}, {"kind": "start", "seconds": 1.0, "at": 1.0}]
        lines += [{"kind": "step", "seconds": 3.0, "at": 4.0, "from": 1, "to": 10}]
        (folder / "goodput.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        if facts:
            write_facts(folder, some_facts())
        return folder

    return write
