"""The time of a pipeline on its stages, for schedules whose times are known."""

import pytest
from spmdkit.parallel.schedule.builders import make_schedule
from spmdkit.parallel.schedule.stages import assign
from spmdkit.parallel.schedule.timetable import make_timetable
from spmdkit.planning.pipeline_time import idle_share, pipeline_seconds, textbook_seconds, tick_seconds

STAGES, MICROBATCHES = 4, 32
FORWARD, BACKWARD, WEIGHT = 1.0, 2.0, 1.0
TEXTBOOK = (MICROBATCHES + STAGES - 1) * (FORWARD + BACKWARD + WEIGHT)


def times(name, send=0.0, skip=0.0):
    """The time of a schedule, and that of the textbook; `skip` is the time to skip one part."""
    schedule = make_schedule(name, STAGES, MICROBATCHES)
    timetable = make_timetable(schedule, assign(32, schedule))
    parts = {"forward": [FORWARD, skip], "backward_input": [skip, BACKWARD], "backward_weight": [WEIGHT, skip]}
    exchanges = [send * sum(map(bool, sends)) for sends in timetable.sends]
    return pipeline_seconds(timetable, {**parts, "exchange": exchanges}), textbook_seconds(schedule, timetable, parts)


def test_gpipe_takes_the_time_of_the_textbook():
    assert times("gpipe") == (TEXTBOOK, TEXTBOOK)


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_stages_that_meet_only_for_messages_lose_little(name):
    found, textbook = times(name)
    assert textbook <= TEXTBOOK
    assert found <= 1.01 * textbook


def test_idle_share_is_that_of_the_textbook():
    """(S - 1) / (M + S - 1), if messages take no time."""
    schedule = make_schedule("gpipe", STAGES, MICROBATCHES)
    timetable = make_timetable(schedule, assign(32, schedule))
    parts = {"forward": [0.0, FORWARD], "backward_input": [0.0, BACKWARD], "backward_weight": [0.0, WEIGHT]}
    free = {**parts, "exchange": [0.0] * len(timetable.sends)}
    assert idle_share(timetable, free) == pytest.approx((STAGES - 1) / (MICROBATCHES + STAGES - 1))
    slow = {**parts, "exchange": [0.1] * len(timetable.sends)}
    assert idle_share(timetable, slow) > idle_share(timetable, free)


def test_messages_and_skipped_parts_take_time():
    """The first message passes all stages before the first backward begins."""
    without, _ = times("gpipe")
    assert times("gpipe", send=0.1)[0] >= without + 2 * (STAGES - 1) * 0.1
    sent = times("1f1b", send=0.1)[0] - times("1f1b")[0]
    assert sent <= 2 * (MICROBATCHES + STAGES) * 2 * 0.1, "both directions of an exchange once for each microbatch"
    assert times("gpipe", skip=0.01)[0] == pytest.approx(without + 105 * 2 * 0.01, abs=1.0)


@pytest.mark.parametrize(
    ("name", "blocks", "parts", "seconds"),
    [
        ("1f1b", 2, {"head_backward": [5.0, 0.0], "embed": [0.0, 3.0]}, [2 * 3.0, 2 * 5.0]),
        ("gpipe", 5, {"forward": [0.0, 3.0]}, [2 * 3.0, 2 * 2.0]),  # 3 blocks and 2
    ],
)
def test_a_stage_takes_the_time_of_its_own_parts(name, blocks, parts, seconds):
    schedule = make_schedule(name, 2, 2)
    timetable = make_timetable(schedule, assign(blocks, schedule))
    assert tick_seconds(timetable, parts).sum(axis=0).tolist() == seconds
