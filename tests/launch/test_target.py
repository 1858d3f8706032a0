import pytest
from spmdkit.launch.target import LocalTarget, parse_target


def test_local():
    assert parse_target("local:2x4") == LocalTarget(num_processes=2, devices=4)
    assert str(parse_target("local:16x1")) == "local:16x1"


@pytest.mark.parametrize("text", ["local", "local:2", "local:0x4", "local:2x", "slurm:2x4", "2x4", "local:2x4x1"])
def test_other_forms_are_refused(text):
    with pytest.raises(ValueError, match=r"--on .* is not a target; give local:PxD, P processes .* local:2x4"):
        parse_target(text)


@pytest.mark.parametrize("text", ["local:257x1", "local:1x4097", f"local:1x{'9' * 5000}"])
def test_more_than_a_machine_runs(text):
    with pytest.raises(
        ValueError, match=r"one machine runs at most 256 processes of 4096 simulated devices. Give fewer."
    ):
        parse_target(text)
