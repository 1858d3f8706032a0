"""Reading checkpoints onto any mesh, in whole or in part, and on the host; no flipped bit is restored."""

import errno
import hashlib
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from spmdkit.checkpoints import manager as manager_file
from spmdkit.checkpoints import restore as restore_file
from spmdkit.checkpoints.damage import CheckpointError, CheckpointUnavailable, DamagedCheckpoint
from spmdkit.checkpoints.directory import DESCRIPTION
from spmdkit.checkpoints.manager import Checkpoints, Restored
from spmdkit.checkpoints.restore import StoredCheckpoint, read_averages, read_tree
from spmdkit.layouts.paths import leaves_with_paths
from support import checkpoint_states
from support.checkpoint_states import State, abstract, assert_equal, host_state, opened, placed, run_state
from support.runs import whole

# A state onto a mesh


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


def test_names_every_difference_from_the_state(written):
    state = host_state(0)
    params = {"blocks": {"kernel": np.zeros((3, 16, 9), np.float32)}, "norm": np.zeros(16, np.float32)}
    params |= {"bias": np.zeros(4, np.float32)} | {f"w{i}": np.zeros(2, np.float32) for i in range(30)}
    other = State(state.step, params, state.opt_state[:1])
    with opened(written, other) as checkpoints, pytest.raises(CheckpointError) as caught:
        checkpoints.restore()
    message = str(caught.value)
    assert "does not fit the state of this run, in 34 arrays" in message
    assert "params/bias: not in the checkpoint" in message
    assert "... and 14 more" in message
    assert "run.dir" in message


def test_rejects_a_renamed_checkpoint(written):
    (written / "20").rename(written / "30")
    with opened(written) as checkpoints:
        for use in (checkpoints.restore, checkpoints.check_fits):
            with pytest.raises(CheckpointError, match=r"/30 was renamed: it is the state of step 20\. "):
                use()


def test_check_fits_reads_no_array(written, monkeypatch):
    other = State(np.int32(0), {"w": np.zeros(3, np.float32)}, {})
    (written / "999").mkdir()  # damaged: skipped, as in a restore
    monkeypatch.setattr(ocp.args, "PyTreeRestore", None)
    with opened(written) as checkpoints:
        checkpoints.check_fits()
    wrong = pytest.raises(CheckpointError, match=r"/20 does not fit the state of this run, in 6 arrays")
    with opened(written, other) as checkpoints, wrong:
        checkpoints.check_fits()
    with opened(written / "none", other) as checkpoints:
        checkpoints.check_fits()


def test_finds_arrays_that_were_swapped_after_they_were_read(written, monkeypatch):
    """The checksums are compared by path in the state that training gets, not in what was read."""
    right, one, other = restore_file._as_tree, "params/blocks/kernel", "opt_state/0/blocks/kernel"

    def swapped(arrays, abstract_state):
        return right({**arrays, one: arrays[other], other: arrays[one]}, abstract_state)

    monkeypatch.setattr(restore_file, "_as_tree", swapped)
    with opened(written) as checkpoints:
        with pytest.raises(DamagedCheckpoint, match=f"{other}, {one} of 6 arrays"):
            checkpoints.restore(20)
        with pytest.raises(CheckpointError, match="No checkpoint in"):
            checkpoints.restore_newest(5)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("of_tensorstore", [False, True])
def test_an_unreadable_checkpoint_is_not_called_damaged(written, monkeypatch, number, of_tensorstore):
    def refuse(*ignored):
        text = f"Error reading local file: {os.strerror(number)} [OS error {number}: ...]"
        raise ValueError(text) if of_tensorstore else OSError(number, os.strerror(number), "x")

    with opened(written) as checkpoints:
        monkeypatch.setattr(restore_file, "read_description", refuse)
        with pytest.raises(CheckpointUnavailable):
            checkpoints.check_fits()
        with pytest.raises(CheckpointUnavailable, match="may be intact: leave it there") as raised:
            checkpoints.restore_newest(5)
        assert raised.value.exit_code == 75


# The newest that all processes can read


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["_METADATA", "manifest.ocdbt"])
def test_skips_damaged_checkpoints_and_keeps_them(written, victim):
    (written / "20" / "state" / victim).unlink()
    (written / "999").mkdir()  # as a file system may leave it
    lines = []
    with opened(written) as checkpoints:
        with pytest.raises(DamagedCheckpoint, match=r"/20 is damaged: "):
            checkpoints.restore(20)
        restored = checkpoints.restore_newest(5, lines.append)
        assert_equal(restored.state, host_state(10))
        assert (restored.step, sorted(restored.damaged)) == (10, [20, 999])
        assert [line.split(" is damaged")[0][-4:] for line in lines] == ["/999", "s/20"]
        assert checkpoints.steps() == [10, 20, 999], "a read moves nothing"
        assert [path.name for path in checkpoints.keep_aside(restored.damaged)] == ["damaged-999", "damaged-20"]
        assert checkpoints.steps() == [10]
        checkpoints.save(20, placed(host_state(0), 1, "data", split=False))
        checkpoints.wait()
        assert checkpoints.steps() == [10, 20]
    assert (written / "damaged-20" / "state").is_dir()


class FakeCheckpoints:
    """Checkpoints that are damaged when they are read, when they are compared, or not at all."""

    def __init__(self, monkeypatch, folder, *steps, **damage):
        self.folder, self.damage, self.calls, self.names, self.others, self.lines = folder, damage, [], [], {}, []
        for step in steps:
            (folder / str(step)).mkdir()
        monkeypatch.setattr(manager_file, "open_fitting", lambda folder, state: self.open(folder))
        monkeypatch.setattr(manager_file, "compared_state", self.compare)
        monkeypatch.setattr(restore_file, "exchange", self.exchange)

    def open(self, folder):
        self.opened = folder.name
        return self

    def restore(self, abstract_state):
        self.calls.append(f"read {self.opened}")
        if self.damage.get(f"read_{self.opened}"):
            raise DamagedCheckpoint(f"{self.opened} is cut.")
        return {"w": self.opened}

    def compare(self, stored, arrays, abstract_state):
        self.calls.append(f"compare {self.opened}")
        if self.damage.get(f"compare_{self.opened}"):
            raise DamagedCheckpoint(f"{self.opened} has other bits.")
        return f"state of {arrays['w']}"

    def exchange(self, name, text, *, seconds):
        self.names.append(name)
        return [text, self.others.get(name, "")]

    def restore_newest(self):
        with Checkpoints(self.folder, keep=3, abstract_state=np.zeros(1)) as checkpoints:
            return checkpoints.restore_newest(5, self.lines.append)


def test_uses_the_newest_and_reads_no_other(monkeypatch, tmp_path):
    fake = FakeCheckpoints(monkeypatch, tmp_path, 20, 30)
    assert fake.restore_newest() == Restored(30, "state of 30", {})
    assert fake.calls == ["read 30", "compare 30"]
    assert fake.names == ["read 30 of restore 1", "compare 30 of restore 1"]
    assert fake.lines == []


def test_all_processes_go_back_if_one_finds_damage(monkeypatch, tmp_path):
    fake = FakeCheckpoints(monkeypatch, tmp_path, 10, 20, 30)
    fake.others = {"read 30 of restore 1": "rank 1 cannot read 30.", "compare 20 of restore 1": "rank 1: other bits."}
    assert fake.restore_newest() == Restored(
        10, "state of 10", {30: "rank 1 cannot read 30.", 20: "rank 1: other bits."}
    )
    assert fake.calls == ["read 30", "read 20", "compare 20", "read 10", "compare 10"], "30 is never compared"
    assert fake.lines[0] == "rank 1 cannot read 30. Going back to the checkpoint before it."


def test_lists_every_reason_if_all_are_damaged(monkeypatch, tmp_path):
    fake = FakeCheckpoints(monkeypatch, tmp_path, 20, 30, read_30=True, compare_20=True)
    with pytest.raises(CheckpointError, match=r"(?s)No checkpoint in .* can be used.*30 is cut.*20 has.*--fresh"):
        fake.restore_newest()
    assert fake.names == ["read 30 of restore 1", "read 20 of restore 1", "compare 20 of restore 1"]


def test_an_error_that_is_not_damage_ends_the_restore(monkeypatch, tmp_path):
    fake = FakeCheckpoints(monkeypatch, tmp_path, 20, 30)
    fake.open = lambda folder: (_ for _ in ()).throw(CheckpointError("does not fit"))
    with pytest.raises(CheckpointError, match="does not fit"):
        fake.restore_newest()
    assert fake.names == []


# On the host


def test_every_array_reads_as_it_was_saved(stored):
    expected = dict(leaves_with_paths(run_state(20)))
    assert set(stored.arrays) == set(expected)
    found = stored.read(list(expected))
    for path, leaf in expected.items():
        array, leaf = stored.arrays[path], np.asarray(leaf)
        assert (array.shape, array.dtype, stored.num_bytes(path)) == (leaf.shape, leaf.dtype, leaf.nbytes)
        np.testing.assert_array_equal(found[path], leaf)
    assert (stored.step, stored.about, stored.mesh) == (20, checkpoint_states.ABOUT, {"fsdp": 8})


def test_groups_join_small_arrays(stored, monkeypatch):
    paths = list(stored.arrays)
    assert list(stored.groups(paths)) == [paths]
    monkeypatch.setattr(restore_file, "GROUP_BYTES", 1)
    assert list(stored.groups(paths)) == [[path] for path in paths]
    assert list(stored.groups([])) == []


@pytest.mark.parametrize("key", ["step", "about", "notes", "saved", "checksums", "files"])
def test_a_description_of_another_version_is_an_error_of_the_checkpoint(run, key):
    path = run / "checkpoints" / "20" / DESCRIPTION
    description = json.loads(path.read_bytes())["description"]
    del description[key]
    digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({"description": description, "sha256": digest}))
    with pytest.raises(CheckpointError, match=rf"/20 cannot be opened: KeyError: '{key}'"):
        StoredCheckpoint(path.parent)


# A part of the state onto a mesh


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_parameters_are_read_onto_any_mesh(stored, devices):
    params = run_state(20).params
    wanted = abstract(placed(params, devices))
    found = read_tree(stored, "params", wanted)
    for (path, array), expected in zip(whole(found).items(), jax.tree.leaves(params), strict=True):
        assert array.tobytes() == np.asarray(expected).tobytes(), path
    assert jax.tree.map(lambda leaf: leaf.sharding, found) == jax.tree.map(lambda leaf: leaf.sharding, wanted)
    assert read_tree(stored, "model_state", ()) == ()


def test_a_changed_parameter_is_found_by_its_checksum(stored):
    stored.checksums["params/norm"] ^= 1
    with pytest.raises(DamagedCheckpoint, match=r"params/norm of 2 arrays read as other bits than were saved"):
        read_tree(stored, "params", abstract(placed(run_state(20).params)))


def test_averages_replace_the_parameters_that_have_one(tmp_path):
    params = {"base": np.ones((16, 8), jnp.bfloat16), "head": np.full(16, 2, jnp.bfloat16)}
    average = {"average": {"head": np.full(16, 2.5, np.float32)}}  # base was frozen
    state = State(np.int32(4), params, average, np.array([0, 1], np.uint32))
    stored = StoredCheckpoint(checkpoint_states.write(tmp_path / "run", state) / "checkpoints" / "4")
    found = read_averages(stored, abstract(placed(params, 2)))
    assert (found["head"].dtype, float(found["head"][0]), float(found["base"][0, 0])) == (jnp.bfloat16, 2.5, 1)
    with pytest.raises(CheckpointError, match="holds other averages than the model"):
        read_averages(stored, abstract(placed({"base": params["base"]}, 2)))


def test_a_checkpoint_without_averages_is_an_error(stored):
    with pytest.raises(CheckpointError, match=r"contains no averages of its parameters.*optimizer\.ema"):
        stored.averages()
