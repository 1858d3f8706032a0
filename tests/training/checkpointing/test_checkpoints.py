"""Checkpoints: any mesh to any mesh exactly, killed saves ignored, failed saves loud, mismatches named."""

import errno
import functools
import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from spmdkit.layouts.paths import leaves_with_paths
from spmdkit.training.checkpointing import checkpoints as checkpoints_file
from spmdkit.training.checkpointing.checkpoints import (
    CheckpointError,
    Checkpoints,
    CheckpointUnavailable,
    DamagedCheckpoint,
    SaveFailed,
)


class State(NamedTuple):
    step: Any
    params: Any
    opt_state: Any


def unfinished_reads(test):
    """Orbax leaves reads under way where another failed: they end, with warnings, within the test."""

    @functools.wraps(test)
    def collected(*arguments, **named):
        test(*arguments, **named)
        gc.collect()

    return pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")(collected)


def sharding(num_devices: int, axis: str, *spec) -> NamedSharding:
    mesh = Mesh(np.array(jax.devices()[:num_devices]), (axis,), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec(*spec))


def host_state(step: int) -> State:
    """Awkward on purpose: a scalar, bfloat16, an empty array, empty containers, a stacked weight, nothing regular."""
    rng = np.random.default_rng(step)
    kernel = rng.normal(size=(3, 16, 8)).astype(np.float32)
    params = {"blocks": {"kernel": kernel}, "norm": jnp.asarray(rng.normal(size=16), jnp.bfloat16), "none": {}}
    moments = (jax.tree.map(np.square, params), {"count": np.int32(step)}, np.zeros((0, 4), np.float32))
    return State(np.int32(step), params, moments)


def placed(state: State, num_devices: int, axis: str, split: bool) -> State:
    """On devices; the dim of size 16 split or everything whole."""

    def put(leaf):
        spec = [axis if split and size == 16 else None for size in leaf.shape]
        return jax.device_put(jnp.asarray(leaf), sharding(num_devices, axis, *spec))

    return jax.tree.map(put, state)


def abstract(state: State) -> State:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)


def assert_equal(state: State, reference: State) -> None:
    assert jax.tree.structure(state) == jax.tree.structure(reference)
    for leaf, expected in zip(jax.tree.leaves(state), jax.tree.leaves(reference), strict=True):
        assert leaf.dtype == np.asarray(expected).dtype
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(expected))


@pytest.fixture
def written(tmp_path):
    """A folder with checkpoints of steps 10 and 20, written on fsdp=8."""
    state = placed(host_state(0), 8, "fsdp", split=True)
    with Checkpoints(tmp_path / "checkpoints", keep=3, abstract_state=abstract(state)) as checkpoints:
        for step in (10, 20):
            checkpoints.save(step, placed(host_state(step), 8, "fsdp", split=True))
    return tmp_path / "checkpoints"


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


def test_the_state_may_be_donated_during_the_save(tmp_path):
    state = placed(host_state(1), 8, "fsdp", split=True)
    advance = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1, state), donate_argnums=0)
    with Checkpoints(tmp_path, keep=1, abstract_state=abstract(state)) as checkpoints:
        checkpoints.save(1, state)
        for _ in range(5):
            state = advance(state)
        checkpoints.wait()
        restored = checkpoints.restore()
        assert_equal(restored, host_state(1))
        later = advance(advance(restored))  # nor does donating what was restored harm the files
        assert_equal(checkpoints.restore(), host_state(1))
    assert int(later.step) == 3


def test_keeps_the_newest(tmp_path):
    state = placed(host_state(0), 8, "fsdp", split=True)
    with Checkpoints(tmp_path, keep=2, abstract_state=abstract(state)) as checkpoints:
        for step in (1, 2, 3, 4):
            checkpoints.save(step, state)
            checkpoints.wait()
            assert checkpoints.steps() == [1, 2, 3, 4][:step][-2:]
        checkpoints.save(5, state)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["4", "5"]


def test_going_back_leaves_the_abandoned_course(tmp_path):
    state = placed(host_state(0), 8, "fsdp", split=True)
    with Checkpoints(tmp_path, keep=2, abstract_state=abstract(state)) as checkpoints:
        for step in (10, 20):
            checkpoints.save(step, state)
        checkpoints.save(15, placed(host_state(15), 8, "fsdp", split=True))
        checkpoints.wait()
        assert checkpoints.steps() == [10, 15]
        checkpoints.save(15, placed(host_state(16), 8, "fsdp", split=True))  # the same step again replaces it
        checkpoints.wait()
        assert_equal(checkpoints.restore(15), host_state(16))


def test_nothing_happens_before_the_first_save(tmp_path):
    state = placed(host_state(0), 1, "data", split=False)
    (tmp_path / "c" / "7.orbax-checkpoint-tmp").mkdir(parents=True)
    (tmp_path / "c" / "removed-3").mkdir()
    with Checkpoints(tmp_path / "c", keep=1, abstract_state=abstract(state)) as checkpoints:
        assert checkpoints.latest() is None
        with pytest.raises(CheckpointError, match=r"There is no complete checkpoint in .*/c"):
            checkpoints.restore()
        assert len(list((tmp_path / "c").iterdir())) == 2
        checkpoints.save(8, state)
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["8"]
    with Checkpoints(tmp_path / "absent", keep=1, abstract_state=abstract(state)) as checkpoints:
        assert checkpoints.latest() is None
    assert not (tmp_path / "absent").exists()


def test_an_unknown_step_is_named(written):
    state = placed(host_state(0), 1, "data", split=False)
    checkpoints = Checkpoints(written, keep=3, abstract_state=abstract(state))
    with checkpoints, pytest.raises(CheckpointError, match=r"no complete checkpoint of step 15 in .*; only \[10, 20\]"):
        checkpoints.restore(15)
    with pytest.raises(ValueError, match=r"checkpoint\.keep=0 must be at least 1"):
        Checkpoints(written, keep=0, abstract_state=abstract(state))


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
    right = checkpoints_file.checksums
    monkeypatch.setattr(checkpoints_file, "checksums", lambda arrays: right(arrays).at[2].add(1))
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
        monkeypatch.setattr(checkpoints_file, "_arrays_in", refuse)
        with pytest.raises(CheckpointUnavailable):
            checkpoints.check_fits()
        with pytest.raises(CheckpointUnavailable, match="may well be whole: leave it there") as raised:
            checkpoints.restore_newest(5)
        assert raised.value.exit_code == 75


def test_whether_it_fits_is_known_without_reading_an_array(written, monkeypatch):
    state = placed(host_state(0), 1, "data", split=False)
    other = placed(State(np.int32(0), {"w": np.zeros(3, np.float32)}, {}), 1, "data", split=False)
    (written / "999").mkdir()  # damaged: it is passed over, as when it is restored
    monkeypatch.setattr(checkpoints_file.ocp.args, "PyTreeRestore", None)
    with Checkpoints(written, keep=3, abstract_state=abstract(state)) as checkpoints:
        checkpoints.check_fits()
    wrong = pytest.raises(CheckpointError, match=r"/20 does not fit the state of this run, in 6 arrays")
    with Checkpoints(written, keep=3, abstract_state=abstract(other)) as checkpoints, wrong:
        checkpoints.check_fits()
    with Checkpoints(written / "none", keep=3, abstract_state=abstract(other)) as checkpoints:
        checkpoints.check_fits()


def test_what_the_run_says_of_itself_is_kept(tmp_path):
    state = placed(host_state(1), 1, "data", split=False)
    about = {"mesh": {"data": 1}, "versions": {"jax": "1"}}
    with Checkpoints(tmp_path, keep=3, abstract_state=abstract(state), about=about) as checkpoints:
        checkpoints.save(1, state)
    text = (tmp_path / "1" / "_CHECKPOINT_METADATA").read_text()
    assert json.loads(text)["custom_metadata"]["spmdkit"] == about


def test_notes_come_back_with_their_checkpoint(tmp_path):
    state = placed(host_state(1), 1, "data", split=False)
    with Checkpoints(tmp_path, keep=3, abstract_state=abstract(state), about={"mesh": {}}) as checkpoints:
        checkpoints.save(1, state, notes={"callbacks": [["csv", {"best": 0.1}]]})
        checkpoints.save(2, state)
        checkpoints.wait()
        assert checkpoints.notes(1) == {"callbacks": [["csv", {"best": 0.1}]]}
        assert checkpoints.notes(2) == {}
        with pytest.raises(CheckpointError, match="no complete checkpoint of step 3"):
            checkpoints.notes(3)


def test_some_are_kept_beside_the_newest_while_that_is_asked_for(tmp_path):
    state = placed(host_state(1), 1, "data", split=False)
    seen = []
    with Checkpoints(tmp_path, keep=1, abstract_state=abstract(state)) as checkpoints:
        for step, also in [(1, [1]), (2, [1, 99]), (3, [2, 1]), (4, [2]), (5, [])]:
            checkpoints.save(step, state, also_keep=also)
            checkpoints.wait()
            seen.append(checkpoints.steps())
    assert seen == [[1], [1, 2], [1, 2, 3], [2, 4], [5]]


def test_a_wait_for_the_previous_save_is_told(tmp_path, monkeypatch):
    """Of every save the end takes long; more and more seldom it is said."""
    state = placed(host_state(1), 1, "data", split=False)
    said = []
    monkeypatch.setattr(checkpoints_file, "NOTICED_SECONDS", 0.2)
    rename = os.rename

    def slow(*arguments, **options):
        time.sleep(0.5)
        return rename(*arguments, **options)

    with Checkpoints(tmp_path, keep=3, abstract_state=abstract(state)) as checkpoints:
        monkeypatch.setattr(os, "rename", slow)
        for step in range(1, 6):
            checkpoints.save(step, state, said.append)
            assert len(list(tmp_path.glob("*.orbax-checkpoint-tmp*"))) <= 1, "no more than one is under way"
        monkeypatch.undo()
    assert 2 <= len(said) <= 3
    assert re.match(
        r"warning: training waited \d\.\d s at step 2 for the checkpoint of step 1 \(\d s in all\)", said[0]
    )


def test_what_a_removal_left_behind_blocks_no_save(written):
    state = placed(host_state(0), 8, "fsdp", split=True)
    with Checkpoints(written, keep=1, abstract_state=abstract(state)) as checkpoints:
        checkpoints.save(30, state)
        for step in (10, 20):
            (written / f"removed-{step}" / "busy").mkdir(parents=True)  # as where a file of it is still open
        checkpoints.wait()
        assert checkpoints.steps() == [30]


FAILING = """
import os, resource, sys
from pathlib import Path
import jax
from spmdkit.training.checkpointing.checkpoints import Checkpoints, SaveFailed

directory, moment = Path(sys.argv[1]) / "checkpoints", sys.argv[2]
directory.with_name("disk").mkdir()
directory.symlink_to("disk")
state = {"w": jax.random.normal(jax.random.key(0), (1024, 4096))}  # nothing that compresses
checkpoints = Checkpoints(directory, keep=2, abstract_state=jax.eval_shape(lambda: state))
checkpoints.save(1, state)
checkpoints.wait()

def ruin():  # the folder is gone at once and cannot come back; permissions would not stop a test that root runs
    file = directory.with_name("file")
    file.touch()
    os.replace(file, directory)

failures = []
def attempt(action):
    try:
        action()
    except SaveFailed as failure:
        failures.append(str(failure))

if moment == "gone before":
    ruin()
if moment == "no room":
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
attempt(lambda: checkpoints.save(2, state))
if moment == "gone during":
    ruin()
attempt(checkpoints.wait)
attempt(lambda: checkpoints.save(3, state))
attempt(checkpoints.wait)
attempt(checkpoints.check)
attempt(checkpoints.close)
assert len(failures) >= 4 and len(set(failures)) == 1, failures
print(failures[0])
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["gone before", "gone during", "no room"])
def test_a_failed_save_is_loud_stays_loud_and_ends(tmp_path, moment):
    command = [sys.executable, "-c", FAILING, tmp_path, moment]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)  # Orbax alone may linger for minutes
    assert ended.returncode == 0, ended.stderr
    # The folder may go after the last byte of step 2 and before its end, or after both.
    step = "[23]" if moment == "gone during" else "2"
    assert re.search(f"Checkpoint of step {step} could not be written to", ended.stdout)
    assert "start the same command again: it resumes" in ended.stdout
    assert SaveFailed.exit_code == 75


def test_leaving_with_an_error_keeps_that_error_and_the_save(tmp_path):
    state = placed(host_state(5), 8, "fsdp", split=True)
    checkpoints = Checkpoints(tmp_path, keep=2, abstract_state=abstract(state))
    checkpoints.save(5, state)
    with pytest.raises(KeyError, match="training broke"), checkpoints:
        raise KeyError("training broke")
    assert checkpoints.steps() == [5]


WRITER = """
import os, signal, sys, threading, time
import numpy as np
import jax, jax.numpy as jnp
jax.config.update("jax_num_cpu_devices", 8)
from pathlib import Path
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from spmdkit.training.checkpointing.checkpoints import Checkpoints

directory, moment = Path(sys.argv[1]), sys.argv[2]
mesh = Mesh(np.array(jax.devices()), ("fsdp",), axis_types=(AxisType.Auto,))
sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
state = lambda step: {"w": jax.device_put(jnp.full((1024, 2048), step, jnp.float32), sharding)}
abstract = {"w": jax.ShapeDtypeStruct((1024, 2048), jnp.float32, sharding=sharding)}
checkpoints = Checkpoints(directory, keep=3, abstract_state=abstract)
checkpoints.save(1, state(1))
checkpoints.wait()

def die():
    while True:
        unfinished = list(directory.glob("2.orbax-checkpoint-tmp*"))
        files = [file for folder in unfinished for file in folder.rglob("*") if file.is_file()]
        if {"begun": unfinished, "writing": files}[moment]:
            os.kill(os.getpid(), signal.SIGKILL)

threading.Thread(target=die, daemon=True).start()
checkpoints.save(2, state(2))
checkpoints.wait()
print("not killed")
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["begun", "writing"])
def test_a_kill_during_a_save_costs_only_that_save(tmp_path, moment):
    ended = subprocess.run(
        [sys.executable, "-c", WRITER, tmp_path, moment], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert list(tmp_path.glob("2.orbax-checkpoint-tmp*")), "the kill came too late to test anything"
    target = {"w": jax.ShapeDtypeStruct((1024, 2048), jnp.float32, sharding=sharding(2, "data"))}
    with Checkpoints(tmp_path, keep=3, abstract_state=target) as checkpoints:
        assert checkpoints.latest() == 1
        restored = checkpoints.restore()
        np.testing.assert_array_equal(np.asarray(restored["w"]), 1)
        checkpoints.save(2, restored)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


READER = """
import sys
import numpy as np
import jax, jax.numpy as jnp
from pathlib import Path
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from spmdkit.training.checkpointing.checkpoints import Checkpoints

directory, address, number = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(address, 2, number, cluster_detection_method="deactivate")
mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
split, whole = NamedSharding(mesh, PartitionSpec("fsdp")), NamedSharding(mesh, PartitionSpec())
abstract = {"w": jax.ShapeDtypeStruct((16, 3), jnp.float32, sharding=split),
            "h": jax.ShapeDtypeStruct((16,), jnp.bfloat16, sharding=whole),
            "step": jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)}
with Checkpoints(directory, keep=1, abstract_state=abstract) as checkpoints:
    assert checkpoints.latest() == 3
    state = checkpoints.restore()
    for shard in state["w"].addressable_shards:
        np.testing.assert_array_equal(shard.data, np.arange(48, dtype=np.float32).reshape(16, 3)[shard.index])
    assert state["h"].dtype == jnp.bfloat16 and float(state["h"].addressable_data(0)[5]) == 5
    assert int(state["step"].addressable_data(0)) == 3
    checkpoints.save(4, jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s))(state))
    checkpoints.wait()
    assert checkpoints.latest() == 4
jax.distributed.shutdown()
print("process", number, "is done")
"""


@pytest.mark.multiprocess
@pytest.mark.slow
def test_one_process_writes_two_read_and_write_one_reads(tmp_path):
    state = {"w": jnp.arange(48, dtype=jnp.float32).reshape(16, 3), "h": jnp.arange(16, dtype=jnp.bfloat16)}
    state = jax.device_put(state | {"step": jnp.int32(3)}, sharding(8, "fsdp"))
    state["w"] = jax.device_put(state["w"], sharding(8, "fsdp", "fsdp"))
    shardings = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
    with Checkpoints(tmp_path, keep=1, abstract_state=shardings) as checkpoints:
        checkpoints.save(3, state)
    run_two_processes(READER, tmp_path)
    with Checkpoints(tmp_path, keep=1, abstract_state=shardings) as checkpoints:
        restored = checkpoints.restore()
    for name, leaf in state.items():
        np.testing.assert_array_equal(np.asarray(restored[name]), np.asarray(leaf) + 1)


def run_two_processes(program: str, directory) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
    environment.pop("XLA_FLAGS", None)
    command = [sys.executable, "-c", program, str(directory), address]
    processes = [
        subprocess.Popen(
            [*command, str(number)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for number in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs
