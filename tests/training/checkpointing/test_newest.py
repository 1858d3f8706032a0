"""The newest checkpoint that can be read: those that are damaged are passed over, told and kept."""

from pathlib import Path

import pytest
from checkpoint_states import abstract, assert_equal, host_state, placed, unfinished_reads
from spmdkit.training.checkpointing import newest
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


class FakeReader:
    """Reads checkpoints that are damaged when they are read, when they are compared, or not at all."""

    def __init__(self, **damage):
        self.damage, self.calls = damage, []

    def arrays(self, folder):
        self.calls.append(f"read {folder.name}")
        if self.damage.get(f"read_{folder.name}"):
            raise DamagedCheckpoint(f"{folder.name} is cut.")
        return {"w": folder.name}

    def checked_state(self, folder, arrays):
        self.calls.append(f"compare {folder.name}")
        if self.damage.get(f"compare_{folder.name}"):
            raise DamagedCheckpoint(f"{folder.name} has other bits.")
        return f"state of {arrays['w']}"


@pytest.fixture
def other_process(monkeypatch):
    """A second process that finds what a test puts into the dict: name of an exchange -> damage."""
    finds, names = {}, []

    def exchange(name, text, *, seconds, say):
        names.append(name)
        return [text, finds.get(name, "")]

    monkeypatch.setattr(newest, "exchange", exchange)
    return finds, names


def test_takes_the_newest_and_reads_no_other(other_process):
    reader, said = FakeReader(), []
    restored = newest.restore_newest(reader, Path("run"), [30, 20], "restore 1", 5, said.append)
    assert restored == newest.Restored(30, "state of 30", {})
    assert reader.calls == ["read 30", "compare 30"]
    assert other_process[1] == ["read 30 of restore 1", "compare 30 of restore 1"]
    assert said == []


def test_all_processes_go_back_if_one_finds_damage(other_process):
    finds, _ = other_process
    finds |= {"read 30 of restore 1": "rank 1 cannot read 30.", "compare 20 of restore 1": "rank 1 reads other bits."}
    reader, said = FakeReader(), []
    restored = newest.restore_newest(reader, Path("run"), [30, 20, 10], "restore 1", 5, said.append)
    assert (restored.step, restored.state) == (10, "state of 10")
    assert restored.damaged == {30: "rank 1 cannot read 30.", 20: "rank 1 reads other bits."}
    assert reader.calls == ["read 30", "read 20", "compare 20", "read 10", "compare 10"], "30 is never compared"
    assert said == [
        "rank 1 cannot read 30. Going back to the checkpoint before it.",
        "rank 1 reads other bits. Going back to the checkpoint before it.",
    ]


def test_own_damage_is_exchanged_and_every_reason_is_listed(other_process):
    reader = FakeReader(read_30=True, compare_20=True)
    with pytest.raises(CheckpointError, match=r"(?s)No checkpoint in run can be used.*30 is cut.*20 has other bits"):
        newest.restore_newest(reader, Path("run"), [30, 20], "restore 2", 5, print)
    assert other_process[1] == ["read 30 of restore 2", "read 20 of restore 2", "compare 20 of restore 2"]


def test_errors_that_are_not_damage_end_the_restore(other_process):
    reader = FakeReader()
    reader.arrays = lambda folder: (_ for _ in ()).throw(CheckpointError("does not fit"))
    with pytest.raises(CheckpointError, match="does not fit"):
        newest.restore_newest(reader, Path("run"), [30, 20], "restore 3", 5, print)
    assert other_process[1] == []
