"""The newest checkpoint that can be read: those that are damaged are passed over, told and kept."""

import pytest
from checkpoint_states import abstract, assert_equal, host_state, placed, unfinished_reads
from spmdkit.training.checkpointing.checkpoints import Checkpoints
from spmdkit.training.checkpointing.errors import CheckpointError, DamagedCheckpoint


@unfinished_reads
@pytest.mark.parametrize("victim", ["_METADATA", "manifest.ocdbt"])
def test_a_damaged_checkpoint_is_passed_over_and_kept(written, victim):
    (written / "20" / "state" / victim).unlink()
    (written / "999").mkdir()  # as a file system may leave it
    state = placed(host_state(0), 1, "data", split=False)
    said = []
    with Checkpoints(written, keep=3, abstract_state=abstract(state)) as checkpoints:
        with pytest.raises(DamagedCheckpoint, match=r"/20 is damaged: "):
            checkpoints.restore(20)
        restored = checkpoints.restore_newest(5, said.append)
        assert_equal(restored.state, host_state(10))
        assert (restored.step, sorted(restored.damaged)) == (10, [20, 999])
        assert [line.split(" is damaged")[0][-4:] for line in said] == ["/999", "s/20"]
        assert checkpoints.steps() == [10, 20, 999], "nothing is moved while it is only read"
        assert [path.name for path in checkpoints.keep_aside(restored.damaged)] == ["damaged-999", "damaged-20"]
        assert checkpoints.steps() == [10]
        checkpoints.save(20, state)
        checkpoints.wait()
        assert checkpoints.steps() == [10, 20]
    assert (written / "damaged-20" / "state").is_dir()


@unfinished_reads
def test_without_any_whole_checkpoint_the_way_out_is_told(written):
    for step in ("10", "20"):
        (written / step / "state" / "manifest.ocdbt").unlink()
    state = placed(host_state(0), 1, "data", split=False)
    with Checkpoints(written, keep=3, abstract_state=abstract(state)) as checkpoints:
        with pytest.raises(
            CheckpointError, match=r"(?s)No checkpoint .* can be used.*/20 is.*/10 is.*--fresh"
        ) as raised:
            checkpoints.restore_newest(5)
        assert raised.value.exit_code == 2
