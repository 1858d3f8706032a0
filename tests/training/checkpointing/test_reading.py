"""Reading checkpoints: any mesh to any mesh exactly, mismatches named, no flipped bit restored, refusals not damage."""

import errno
import os

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpoint_states import State, abstract, assert_equal, host_state, placed, unfinished_reads
from spmdkit.layouts.paths import leaves_with_paths
from spmdkit.training.checkpointing import reading
from spmdkit.training.checkpointing.checkpoints import Checkpoints
from spmdkit.training.checkpointing.errors import CheckpointError, CheckpointUnavailable, DamagedCheckpoint


@pytest.mark.parametrize(
    ("num_devices", "axis", "split"),
    [
        (8, "fsdp", True),  # as it was written
        (2, "data", False),  # fewer devices, another axis, everything whole
        (2, "data", True),  # other parts
        (1, "data", False),  # one device
    ],
)
def test_restores_exactly_onto_any_mesh(written, num_devices, axis, split):
    target = placed(host_state(0), num_devices, axis, split)
    with Checkpoints(written, keep=3, abstract_state=abstract(target)) as checkpoints:
        assert checkpoints.latest() == 20
        assert_equal(checkpoints.restore(), host_state(20))
        restored = checkpoints.restore(10)
    assert_equal(restored, host_state(10))
    assert jax.tree.map(lambda leaf: leaf.sharding, restored) == jax.tree.map(lambda leaf: leaf.sharding, target)


def test_every_difference_is_named_at_once(written):
    state = host_state(0)
    params = {"blocks": {"kernel": np.zeros((3, 16, 9), np.float32)}, "norm": np.zeros(16, np.float32)}
    other = placed(State(state.step, params | {"bias": np.zeros(4, np.float32)}, state.opt_state[:1]), 1, "data", False)
    checkpoints = Checkpoints(written, keep=3, abstract_state=abstract(other))
    with pytest.raises(CheckpointError) as caught:
        checkpoints.restore()
    checkpoints.close()
    message = str(caught.value)
    assert "does not fit the state of this run, in 4 arrays" in message
    assert "params/bias: not in the checkpoint" in message
    assert "opt_state/1/count: only in the checkpoint" in message
    assert "kernel: float32[3, 16, 8] in the checkpoint, float32[3, 16, 9] in this run" in message
    assert "params/norm: bfloat16[16] in the checkpoint, float32[16] in this run" in message
    assert "run.dir" in message


def test_a_long_list_of_differences_is_cut(tmp_path):
    one = placed(State(np.int32(0), {}, {}), 1, "data", False)
    many = placed(State(np.int32(0), {f"w{i}": np.zeros(2, np.float32) for i in range(50)}, {}), 1, "data", False)
    with Checkpoints(tmp_path, keep=1, abstract_state=abstract(one)) as checkpoints:
        checkpoints.save(1, one)
    checkpoints = Checkpoints(tmp_path, keep=1, abstract_state=abstract(many))
    with checkpoints, pytest.raises(CheckpointError, match=r"in 50 arrays(?s:.*)\.\.\. and 30 more"):
        checkpoints.restore()


@unfinished_reads
def test_no_flipped_bit_is_restored(written):
    """Of every file of a checkpoint, in turn, a few bits: it is told, or it is in nothing that is read."""
    state = placed(host_state(0), 1, "data", split=False)
    files = sorted(path for path in (written / "20").rglob("*") if path.is_file() and path.stat().st_size)
    random, found = np.random.default_rng(0), 0
    with Checkpoints(written, keep=3, abstract_state=abstract(state)) as checkpoints:
        for path in files:
            whole = path.read_bytes()
            for position in random.integers(0, len(whole), 3):
                flipped = bytearray(whole)
                flipped[position] ^= 1 << int(random.integers(8))
                path.write_bytes(flipped)
                try:
                    assert_equal(checkpoints.restore(20), host_state(20))
                except CheckpointError:
                    found += 1
            path.write_bytes(whole)
        assert_equal(checkpoints.restore(20), host_state(20))
    assert found >= 3


def test_other_bits_than_were_saved_are_named(written, monkeypatch):
    """The files are what Orbax wrote; an array has changed on its way."""
    right = reading.checksums
    monkeypatch.setattr(reading, "checksums", lambda arrays: right(arrays).at[2].add(1))
    state = placed(host_state(0), 8, "fsdp", split=True)
    with Checkpoints(written, keep=3, abstract_state=abstract(state)) as checkpoints:
        name = sorted(dict(leaves_with_paths(state)).keys() - {"opt_state/2"})[2]
        with pytest.raises(DamagedCheckpoint, match=rf"damaged: {name} of 6 arrays read as other bits"):
            checkpoints.restore()


def test_a_checkpoint_without_checksums_is_restored(tmp_path, monkeypatch):
    """As earlier versions wrote them."""
    state = placed(host_state(1), 8, "fsdp", split=True)
    with Checkpoints(tmp_path, keep=3, abstract_state=abstract(state)) as checkpoints:
        with monkeypatch.context() as patch:
            save = ocp.args.PyTreeSave
            patch.setattr(
                ocp.args, "PyTreeSave", lambda tree: save({k: v for k, v in tree.items() if "/" in k or k == "step"})
            )
            checkpoints.save(1, state)
        checkpoints.wait()
        assert_equal(checkpoints.restore(), host_state(1))


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("of_tensorstore", [False, True])
def test_what_the_machine_refuses_is_not_called_damaged(written, monkeypatch, number, of_tensorstore):
    state = placed(host_state(0), 1, "data", split=False)

    def refuse(*ignored):
        text = f"Error reading local file: {os.strerror(number)} [OS error {number}: ...]"
        raise ValueError(text) if of_tensorstore else OSError(number, os.strerror(number), "x")

    with Checkpoints(written, keep=3, abstract_state=abstract(state)) as checkpoints:
        monkeypatch.setattr(reading, "_arrays_in", refuse)
        with pytest.raises(CheckpointUnavailable):
            checkpoints.check_fits()
        with pytest.raises(CheckpointUnavailable, match="may well be whole: leave it there") as raised:
            checkpoints.restore_newest(5)
        assert raised.value.exit_code == 75


def test_whether_it_fits_is_known_without_reading_an_array(written, monkeypatch):
    state = placed(host_state(0), 1, "data", split=False)
    other = placed(State(np.int32(0), {"w": np.zeros(3, np.float32)}, {}), 1, "data", split=False)
    (written / "999").mkdir()  # damaged: it is passed over, as when it is restored
    monkeypatch.setattr(ocp.args, "PyTreeRestore", None)
    with Checkpoints(written, keep=3, abstract_state=abstract(state)) as checkpoints:
        checkpoints.check_fits()
    wrong = pytest.raises(CheckpointError, match=r"/20 does not fit the state of this run, in 6 arrays")
    with Checkpoints(written, keep=3, abstract_state=abstract(other)) as checkpoints, wrong:
        checkpoints.check_fits()
    with Checkpoints(written / "none", keep=3, abstract_state=abstract(other)) as checkpoints:
        checkpoints.check_fits()


def test_detects_arrays_that_are_swapped_after_they_were_read(written, monkeypatch):
    """The checksums are compared by path in the state that training gets, not in what was read."""
    state = placed(host_state(0), 1, "data", split=False)
    right = reading.Reader._as_state

    def swapped(self, arrays):
        other = {
            "params/blocks/kernel": "opt_state/0/blocks/kernel",
            "opt_state/0/blocks/kernel": "params/blocks/kernel",
        }
        return right(self, {path: arrays[other.get(path, path)] for path in arrays})

    monkeypatch.setattr(reading.Reader, "_as_state", swapped)
    with Checkpoints(written, keep=3, abstract_state=abstract(state)) as checkpoints:
        with pytest.raises(DamagedCheckpoint, match="opt_state/0/blocks/kernel, params/blocks/kernel of 6 arrays"):
            checkpoints.restore(20)
        with pytest.raises(CheckpointError, match="No checkpoint in"):
            checkpoints.restore_newest(5)
