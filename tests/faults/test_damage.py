"""Damaged checkpoints: the run goes on from the one before, bit for bit as it was, and keeps what is damaged."""

import shutil

import numpy as np
import pytest
from spmdkit.launch.cli import main
from support.faults import damage
from support.runs import assert_same_arrays, metrics, state_arrays, write_config

pytestmark = pytest.mark.slow
STEPS = 12


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The config of a run that nothing happened to, with checkpoints of steps 4, 8 and 12."""
    config = write_config(tmp_path_factory.mktemp("whole"), checkpoint={"every": 4, "keep": 3})
    assert main(["train", str(config)]) == 0
    return config


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("how", ["flip", "truncate", "empty", "metadata", "description"])
def test_falls_back_to_previous_checkpoint(how, whole, tmp_path, capsys, cli):
    config = write_config(tmp_path, checkpoint={"every": 4, "keep": 3})
    shutil.copytree(whole.parent / "run", tmp_path / "run")
    (tmp_path / "run" / "report.html").unlink()  # as if it had died before its end
    checkpoint = tmp_path / "run" / "checkpoints" / "12"
    (checkpoint / "description.json").unlink() if how == "description" else damage(checkpoint, how)
    capsys.readouterr()
    printed = cli(0, "train", config)
    text = printed.out + printed.err
    if "damaged" in text:
        assert "Going back to the checkpoint before it." in text
        assert "at step 8 of 12" in text
        assert (tmp_path / "run" / "checkpoints" / "damaged-12").is_dir()
    assert "damaged" in text or how in ("metadata", "description")
    assert metrics(tmp_path / "run") == metrics(whole.parent / "run")
    assert_same_arrays(state_arrays(config, STEPS), state_arrays(whole, STEPS))
    assert all(np.isfinite(array).all() for array in state_arrays(config, STEPS).values())
