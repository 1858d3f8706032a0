"""Which checkpoints stay: the newest, those asked for, none of a course that was left."""

from checkpoint_states import abstract, assert_equal, host_state, placed
from spmdkit.training.checkpointing.checkpoints import Checkpoints


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


def test_some_are_kept_beside_the_newest_while_that_is_asked_for(tmp_path):
    state = placed(host_state(1), 1, "data", split=False)
    seen = []
    with Checkpoints(tmp_path, keep=1, abstract_state=abstract(state)) as checkpoints:
        for step, also in [(1, [1]), (2, [1, 99]), (3, [2, 1]), (4, [2]), (5, [])]:
            checkpoints.save(step, state, also_keep=also)
            checkpoints.wait()
            seen.append(checkpoints.steps())
    assert seen == [[1], [1, 2], [1, 2, 3], [2, 4], [5]]


def test_what_a_removal_left_behind_blocks_no_save(written):
    state = placed(host_state(0), 8, "fsdp", split=True)
    with Checkpoints(written, keep=1, abstract_state=abstract(state)) as checkpoints:
        checkpoints.save(30, state)
        for step in (10, 20):
            (written / f"removed-{step}" / "busy").mkdir(parents=True)  # as where a file of it is still open
        checkpoints.wait()
        assert checkpoints.steps() == [30]


def test_what_has_the_name_of_a_checkpoint_and_is_none_is_kept(tmp_path):
    (tmp_path / "5").write_text("notes of somebody")
    state = placed(host_state(0), 1, "data", split=False)
    with Checkpoints(tmp_path, keep=2, abstract_state=abstract(state)) as checkpoints:
        checkpoints.save(5, state)
    assert (tmp_path / "damaged-5").read_text() == "notes of somebody"
    assert checkpoints.steps() == [5]
