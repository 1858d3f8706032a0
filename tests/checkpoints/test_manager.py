"""Saving: killed and failed saves, notes, the checkpoints that are kept, several processes."""

import os
import re
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import jax
import pytest
import tensorstore
from spmdkit.checkpoints import manager as checkpoints_file
from spmdkit.checkpoints.manager import CheckpointError, Checkpoints, SaveFailed
from support.checkpoint_states import abstract, assert_equal, host_state, opened, placed


def test_the_state_can_be_donated_during_the_save(tmp_path):
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


def test_writes_and_removes_nothing_before_the_first_save(tmp_path):
    state = placed(host_state(0), 1, "data", split=False)
    (tmp_path / "c" / "7.orbax-checkpoint-tmp").mkdir(parents=True)
    (tmp_path / "c" / "removed-3").mkdir()
    with Checkpoints(tmp_path / "c", keep=1, abstract_state=abstract(state)) as checkpoints:
        assert checkpoints.latest() is None
        with pytest.raises(CheckpointError, match=r"No complete checkpoint in .*/c"):
            checkpoints.restore()
        assert len(list((tmp_path / "c").iterdir())) == 2
        checkpoints.save(8, state)
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["8"]
    with Checkpoints(tmp_path / "absent", keep=1, abstract_state=abstract(state)) as checkpoints:
        assert checkpoints.latest() is None
    assert not (tmp_path / "absent").exists()


def test_processes_after_the_first_remove_and_rename_nothing(tmp_path, monkeypatch):
    state = placed(host_state(0), 1, "data", split=False)
    monkeypatch.setattr(checkpoints_file, "is_main_process", lambda: False)
    for leftover in ("7.orbax-checkpoint-tmp", "removed-3", "3.orbax-checkpoint-tmp-a"):
        (tmp_path / leftover).mkdir()
    before = {path.name for path in tmp_path.iterdir()}
    checkpoints = Checkpoints(tmp_path, keep=1, abstract_state=abstract(state))
    for step in (1, 2, 3):
        checkpoints.save(step, state)
    checkpoints._orbax.wait_until_finished()
    monkeypatch.setattr(checkpoints._orbax, "check_for_errors", lambda: 1 / 0)
    monkeypatch.setattr(checkpoints_file.shutil, "disk_usage", lambda _: SimpleNamespace(total=9e9, free=2048))
    what = r"Checkpoint of step 3 could .* there: \[1, 2, 3\]; a checkpoint takes up to .*, and 2 KiB are free\."
    with pytest.raises(SaveFailed, match=what):
        checkpoints.check()
    with pytest.raises(SaveFailed):
        checkpoints.close()
    assert {path.name for path in tmp_path.iterdir()} == {*before, "1", "2", "3"}


def test_cuts_no_small_array_into_parts(tmp_path, monkeypatch):
    """Each cut would compile a program."""
    monkeypatch.setattr(jax.lax, "slice_in_dim", lambda *_, **__: 1 / 0)
    state = placed(host_state(1), 8, "data", split=False)
    with Checkpoints(tmp_path, keep=1, abstract_state=abstract(state)) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        assert_equal(checkpoints.restore(), host_state(1))


def test_rejects_an_unknown_step(written):
    wrong = pytest.raises(CheckpointError, match=r"No complete checkpoint of step 15 in .*; only \[10, 20\]")
    with opened(written) as checkpoints, wrong:
        checkpoints.restore(15)
    with pytest.raises(ValueError, match=r"checkpoint\.keep=0 must be at least 1"):
        Checkpoints(written, keep=0, abstract_state={})


def test_notes_are_saved_with_their_checkpoint(tmp_path):
    state = placed(host_state(1), 1, "data", split=False)
    with Checkpoints(tmp_path, keep=3, abstract_state=abstract(state), about={"mesh": {}}) as checkpoints:
        checkpoints.save(1, state, notes={"callbacks": [["csv", {"best": 0.1}]]})
        checkpoints.save(2, state)
        checkpoints.wait()
        assert checkpoints.notes(1) == {"callbacks": [["csv", {"best": 0.1}]]}
        assert checkpoints.notes(2) == {}
        with pytest.raises(CheckpointError, match="No complete checkpoint of step 3"):
            checkpoints.notes(3)


@pytest.mark.slow
def test_logs_a_wait_for_the_previous_save(tmp_path, monkeypatch):
    """The end of every save takes long; the lines become rarer."""
    state = placed(host_state(1), 1, "data", split=False)
    lines = []
    monkeypatch.setattr(checkpoints_file, "MIN_WAIT_SECONDS", 0.2)
    rename = os.rename

    def slow(*arguments, **options):
        time.sleep(0.5)
        return rename(*arguments, **options)

    with Checkpoints(tmp_path, keep=3, abstract_state=abstract(state)) as checkpoints:
        monkeypatch.setattr(os, "rename", slow)
        for step in range(1, 6):
            checkpoints.save(step, state, lines.append)
            assert len(list(tmp_path.glob("*.orbax-checkpoint-tmp*"))) <= 1, "at most one save is in progress"
        monkeypatch.undo()
    assert 2 <= len(lines) <= 3
    assert re.match(r"warning: training waited \d\.\d s at step 2 for the checkpoint of step 1 \(\d s in a", lines[0])


FAILING = """
import os, resource, sys
from pathlib import Path
import jax
from spmdkit.checkpoints.manager import Checkpoints, SaveFailed

directory, moment = Path(sys.argv[1]) / "checkpoints", sys.argv[2]
directory.with_name("disk").mkdir()
directory.symlink_to("disk")
state = {"w": jax.random.normal(jax.random.key(0), (1024, 4096))}  # nothing that compresses
checkpoints = Checkpoints(directory, keep=2, abstract_state=jax.eval_shape(lambda: state))
checkpoints.save(1, state)
checkpoints.wait()

def ruin():  # the directory is gone at once and cannot come back; permissions would not stop root
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
    sys.dont_write_bytecode = True  # a truncated .pyc would stay in the environment
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
def test_a_failed_save_raises_the_same_error_until_the_end(tmp_path, moment):
    command = [sys.executable, "-c", FAILING, tmp_path, moment]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)  # Orbax alone may linger for minutes
    assert ended.returncode == 0, ended.stderr
    # The directory may go after the last byte of step 2 and before its end, or after both.
    step = "[23]" if moment == "gone during" else "2"
    assert re.search(f"Checkpoint of step {step} could not be written to", ended.stdout)
    assert "start the same command again: it resumes" in ended.stdout
    assert SaveFailed.exit_code == 75


@pytest.mark.slow
def test_failed_save_leaves_nothing(tmp_path, monkeypatch):
    """Orbax raises the first error, here of a small file, before another thread has opened the arrays."""
    mkdir, open_array = os.mkdir, tensorstore.open

    def with_obstacle(path, *arguments, **options):
        mkdir(path, *arguments, **options)
        if str(path).endswith("/state.orbax-checkpoint-tmp"):
            mkdir(f"{path}/_sharding")

    def late(spec, **options):
        if isinstance(spec, tensorstore.Spec):
            time.sleep(0.5)
        return open_array(spec, **options)

    monkeypatch.setattr(os, "mkdir", with_obstacle)
    monkeypatch.setattr(tensorstore, "open", late)
    state = placed(host_state(1), 1, "data", split=False)
    checkpoints = Checkpoints(tmp_path, keep=1, abstract_state=abstract(state))
    checkpoints.save(1, state)
    with pytest.raises(SaveFailed, match="_sharding"):
        checkpoints.close()
    for thread in threading.enumerate():
        if thread.name == "array_type_handler":
            threading.Thread.join(thread, 60)
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_training_is_kept_and_the_save_completed(tmp_path):
    state = placed(host_state(5), 8, "fsdp", split=True)
    checkpoints = Checkpoints(tmp_path, keep=2, abstract_state=abstract(state))
    checkpoints.save(5, state)
    with pytest.raises(KeyError, match="training broke"), checkpoints:
        raise KeyError("training broke")
    assert checkpoints.steps() == [5]


# Which checkpoints are kept


def test_going_back_removes_later_steps(tmp_path):
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
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "15"]


def test_keeps_requested_steps_in_addition(tmp_path):
    state = placed(host_state(1), 1, "data", split=False)
    seen = []
    with Checkpoints(tmp_path, keep=1, abstract_state=abstract(state)) as checkpoints:
        for step, also in [(1, [1]), (2, [1, 99]), (3, [2, 1]), (4, [2]), (5, [])]:
            checkpoints.save(step, state, also_keep=also)
            checkpoints.wait()
            seen.append(checkpoints.steps())
    assert seen == [[1], [1, 2], [1, 2, 3], [2, 4], [5]]


def test_an_interrupted_removal_blocks_no_save(written):
    state = placed(host_state(0), 8, "fsdp", split=True)
    with Checkpoints(written, keep=1, abstract_state=abstract(state)) as checkpoints:
        checkpoints.save(30, state)
        for step in (10, 20):
            (written / f"removed-{step}" / "busy").mkdir(parents=True)  # as where a file of it is still open
        checkpoints.wait()
        assert checkpoints.steps() == [30]
