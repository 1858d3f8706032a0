"""A run goes on with fewer devices, and then with more: same batch, same order, same losses."""

import pytest
from support.runs import launch_misbehaving, losses, write_misbehaving_config

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, pytest.mark.faults, pytest.mark.timeout(1200)]
STEPS = 24


def config_in(folder):
    return write_misbehaving_config(
        folder,
        launch={"elastic": ["data", "fsdp"]},
        train={"steps": STEPS, "global_batch": 16},
        checkpoint={"every": 4, "keep": 9},
    )


def test_eight_devices_then_four_then_eight(tmp_path):
    undisturbed = config_in(tmp_path / "undisturbed")
    assert launch_misbehaving(undisturbed, "local:4x2").returncode == 0
    config = config_in(tmp_path / "elastic")
    first = launch_misbehaving(config, "local:4x2", DIE="3:8", EACH="0.1")
    assert first.returncode == 75, first.stderr
    assert "Resized the mesh" not in first.stdout
    second = launch_misbehaving(config, "local:2x2", DIE="1:16", EACH="0.1")
    assert second.returncode == 75, second.stderr
    said = (
        "Note: Resized the mesh for 4 devices (launch.elastic): data 1 instead of 2. The global batch and the order of"
    )
    assert said in second.stdout
    third = launch_misbehaving(config, "local:4x2")
    assert third.returncode == 0, third.stderr
    assert "Resized the mesh" not in third.stdout
    found, expected = (losses(tmp_path / name / "run") for name in ("elastic", "undisturbed"))
    assert list(found) == list(expected) == list(range(1, STEPS + 1))
    same = [step for step in range(1, 9) if found[step] != expected[step]]
    assert not same, "bit for bit where the mesh was the same all along"
    assert found == pytest.approx(expected, abs=1e-5)
