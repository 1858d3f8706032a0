"""A process that is slower than the others is named with figures while the run goes on."""

import re

import pytest
from support.runs import launch_misbehaving, write_misbehaving_config

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, pytest.mark.faults, pytest.mark.timeout(1200)]


def run(folder, **variables):
    config = write_misbehaving_config(
        folder,
        train={"steps": 80, "global_batch": 16},
        checkpoint={"every": 0},
        guards={"straggler_steps": 10, "stragglers": 0.5},
    )
    ended = launch_misbehaving(config, "local:2x2", "strategy={data: 4}", **variables)
    assert ended.returncode == 0, ended.stderr
    return [line for line in ended.stdout.splitlines() if "delays every step" in line]


def test_names_slow_reader(tmp_path):
    """Its reader takes 150 ms more than the other's for each batch: nearly all of a step."""
    (said,) = run(tmp_path, SLOW="1:0.15")
    assert "warning: rank 1 delays every step: of the " in said
    figures = re.search(r"waiting for data ([\d.]+) ms, ([\d.]+) ms elsewhere", said)
    assert figures, said
    assert float(figures[1]) > 75 > float(figures[2])


def test_names_no_rank_if_equal(tmp_path):
    assert run(tmp_path, EACH="0.05") == []
