"""A run goes on with fewer devices, and then with more: same batch, same order, same losses."""

import pytest
from support.cluster import cluster
from support.faults import Fault
from support.runs import environment, losses, write_config

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, pytest.mark.faults, pytest.mark.timeout(1200)]
STEPS = 24


def train(config, processes, *faults):
    with cluster(config, processes=processes, devices=2, faults=faults, environment=environment()) as run:
        return run.wait(600)


def dies(rank, step):
    """A rank dies; a pause before that lets the checkpoint of three steps earlier be completed."""
    return Fault(kind="pause", rank=None, step=step - 1, seconds=6.0), Fault(kind="kill", rank=rank, step=step)


def config_in(folder):
    sections = {"train": {"steps": STEPS, "global_batch": 16}, "checkpoint": {"every": 4, "keep": 9}}
    return write_config(folder, **sections, launch={"elastic": ["data", "fsdp"]}, eval={"every": 0, "batches": 2})


def test_eight_devices_then_four_then_eight(tmp_path):
    undisturbed = config_in(tmp_path / "undisturbed")
    assert train(undisturbed, 4).code == 0
    config = config_in(tmp_path / "elastic")
    first = train(config, 4, *dies(3, 11))
    assert first.code == 75, first.stderr
    assert "Resized the mesh" not in first.stdout
    second = train(config, 2, *dies(1, 19))
    assert second.code == 75, second.stderr
    said = (
        "Note: Resized the mesh for 4 devices (launch.elastic): data 1 instead of 2. The global batch and the order of"
    )
    assert said in second.stdout
    third = train(config, 4)
    assert third.code == 0, third.stderr
    assert "Resized the mesh" not in third.stdout
    found, expected = (losses(tmp_path / name / "run") for name in ("elastic", "undisturbed"))
    assert list(found) == list(expected) == list(range(1, STEPS + 1))
    same = [step for step in range(1, 9) if found[step] != expected[step]]
    assert not same, "bit for bit where the mesh was the same all along"
    assert found == pytest.approx(expected, abs=1e-5)
