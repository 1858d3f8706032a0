"""Whose fault it was, from how processes ended and what they said; `tests/faults/test_death.py` asks real ones."""

import pytest
from spmdkit.launch.supervision.blame import Exit, ending, find_cause
from spmdkit.training.watching.notes import Note, verdict, without_service

GLOO = ["Traceback (most recent call last):", "jax.errors.JaxRuntimeError: INTERNAL: Gloo all-reduce failed: closed"]
LOST = ["error: This process has lost another one of its run: JaxRuntimeError: Gloo AllGather failed: closed by peer"]
SERVICE = ["F1122 client.h:86] Terminating process because the JAX distributed service detected fatal errors."]
SIZES = [
    "terminate called after throwing an instance of 'gloo::EnforceNotMet'",
    "  what():  [enforce fail at pair.cc:459]",
]
HOST = ["error: the connection to host b was lost"]
BOOM = ["Traceback (most recent call last):", "  raise", "RuntimeError: boom"]


def told(*notes, silent=()) -> list[str]:
    return [f"error: {verdict(notes, silent, 3.0)}"]


@pytest.mark.parametrize(
    ("exits", "tails", "rank", "code"),
    [
        ([Exit(1, -9), Exit(0, 1)], [GLOO, []], 1, 75),
        ([Exit(0, 1), Exit(1, -9)], [GLOO, []], 1, 75),
        ([Exit(0, 75), Exit(1, -6)], [LOST, []], 1, 75),
        ([Exit(0, -6), Exit(1, -11)], [SERVICE, []], 1, 75),
        ([Exit(0, -6), Exit(1, 1)], [SERVICE, BOOM], 1, 1),
        ([Exit(0, -6), Exit(1, 75)], [SIZES, HOST], 1, 75),
        ([Exit(0, -6), Exit(1, 1)], [SIZES, GLOO], 0, 75),
        ([Exit(0, -6), Exit(1, 3)], [SERVICE, ["error: Step 3: the loss is nan"]], 1, 3),
        ([Exit(0, 1), Exit(1, 1)], [GLOO, BOOM], 1, 1),
        ([Exit(1, 2), Exit(0, -15, stopped=True)], [[], ["error: no such file"]], 1, 2),
        ([Exit(0, 139), Exit(1, 1)], [[], GLOO], 0, 75),
        ([Exit(1, 1), Exit(0, 1)], [GLOO, GLOO], 1, 75),
        ([Exit(0, 0), Exit(1, 1)], [[], GLOO], 0, 75),
        ([Exit(1, 1), Exit(0, 0)], [[], GLOO], 0, 75),
        ([Exit(0, 0), Exit(1, -15, stopped=True)], [[], []], 0, 75),
    ],
)
def test_the_first_exit_that_is_its_own(exits, tails, rank, code):
    cause = find_cause(exits, tails)
    assert cause is not None
    assert (cause.rank, cause.exit_code, cause.witness) == (rank, code, rank)


@pytest.mark.parametrize(
    ("said", "rank"),
    [
        (told(Note(7, "step", 4), Note(6, "data", 4)), 1),
        (told(Note(7, "step", 4), Note(7, "step", 1), silent=[1]), 1),
        (told(Note(7, "step", 4), None, silent=[1]), 1),
        (["error: Rank 1 on node-b did not come within 20 s (timeouts.rendezvous); 1 of 2 processes did."], 1),
        (["error: Ranks 1, 2 and 3 (nothing came from b) did not come within 20 s (timeouts.rendezvous);"], 1),
        (["error: rank 1 did not come to 'config' within 20 s (timeouts.rendezvous); 1 of 2 processes did."], 1),
    ],
)
def test_whom_a_witness_names(said, rank):
    cause = find_cause([Exit(0, 75), Exit(1, -9, stopped=True)], [said, [], [], []])
    assert cause is not None
    assert (cause.rank, cause.exit_code, cause.witness) == (rank, 75, 0)
    assert "rank 0 tells" in cause.how


def test_the_process_that_keeps_the_notes_is_named_by_another():
    said = [f"error: {without_service(Note(7, 'step', 4), 1, 3.0, 'timeouts.step')}"]
    cause = find_cause([Exit(0, -9, stopped=True), Exit(1, 75)], [[], said])
    assert cause is not None
    assert (cause.rank, cause.witness) == (0, 1)


def test_the_one_that_hung_tells_best_where_it_ended_by_itself():
    said = told(Note(7, "step", 4), Note(6, "data", 4))
    cause = find_cause([Exit(0, 75), Exit(1, 75)], [said, said])
    assert cause is not None
    assert (cause.rank, cause.witness) == (1, 1)


def test_ranks_of_a_witness_that_names_several():
    said = told(Note(7, "step", 4), Note(6, "data", 4), Note(6, "data", 4), Note(6, "data", 4))
    cause = find_cause([Exit(0, 75)], [said, [], [], []])
    assert cause is not None
    assert cause.rank == 1


def test_all_at_the_same_place_is_a_cause_of_its_own():
    said = told(Note(7, "step", 4), Note(7, "step", 4))
    cause = find_cause([Exit(1, 75), Exit(0, 75)], [said, said])
    assert cause is not None
    assert (cause.rank, cause.how) == (1, "exit code 75")


def test_two_that_wait_for_their_devices_in_different_places_are_both_named():
    ahead = Note(8, "evaluation", 9, 2, "measure (parallel/step/train_step.py)")
    said = told(ahead, Note(8, "step", 9, 0, "_wait_for_oldest (training/steps/late_log.py)"))
    cause = find_cause([Exit(1, 75), Exit(0, 75)], [said, said])
    assert cause is not None
    assert (cause.candidates, cause.exit_code, cause.witness) == ((0, 1), 75, 1)
    assert cause.how.startswith("they wait for each other in different places: rank 0 at step 8, evaluation after 2")
    assert "; rank 1 at step 8, step, for 9 s, in _wait_for_oldest" in cause.how
    killed = find_cause([Exit(1, 75), Exit(0, -9)], [said, said])
    assert killed is not None
    assert (killed.rank, killed.candidates) == (0, ())


GOT = ["got SIGTERM: all processes of the run stop after the same step"]
BITS = [
    "error: Step 8: devices that hold copies of the same array hold other bits:",
    "  params/layers/0/kernel: cpu:2049 (rank 1) has other bits than cpu:0 (rank 0), cpu:1 (rank 0), cpu:2048 (rank 1)",
    "The newest checkpoint is older, and its copies were equal.",
]
UNDECIDED = [
    BITS[0],
    "  params/w: cpu:0 (rank 0), cpu:2048 (rank 1) differ from each other; with no majority, any may be at fault",
]


@pytest.mark.parametrize(
    ("tails", "rank", "how", "candidates"),
    [
        ([[], GOT], 1, "got SIGTERM, and all stopped after one step", ()),
        ([BITS, BITS], 1, "its device holds other bits of an array than the copies elsewhere", ()),
        ([UNDECIDED, UNDECIDED], 0, "their devices hold other bits of an array than the copies elsewhere", (0, 1)),
    ],
)
def test_all_that_end_together_do_so_because_of_one(tails, rank, how, candidates):
    """Not the one that exits first is named, but the one that is the reason."""
    cause = find_cause([Exit(0, 75), Exit(1, 75)], tails)
    assert cause is not None
    assert (cause.rank, cause.how, cause.exit_code, cause.candidates) == (rank, how, 75, candidates)
    killed = find_cause([Exit(0, -9), Exit(1, 75)], tails)
    assert killed is not None
    assert killed.how == "killed by SIGKILL"


def test_a_second_signal_is_no_common_end():
    cause = find_cause([Exit(1, 75), Exit(0, 75)], [LOST, [*GOT, "ended by SIGTERM; the same command goes on"]])
    assert cause is not None
    assert (cause.rank, cause.how) == (1, "exit code 75")


def test_one_that_is_stopped():
    cause = find_cause([Exit(0, 75), Exit(1, -9, stopped=True)], [LOST, []], halted=[1])
    assert cause is not None
    assert (cause.rank, cause.exit_code) == (1, 75)
    assert cause.how.startswith("stopped (SIGSTOP)")


def test_nobody_is_to_blame_for_a_signal_or_a_good_end():
    assert find_cause([Exit(0, 0), Exit(1, 0)], [[], []]) is None
    assert find_cause([Exit(0, -15, stopped=True)], [[]], asked=True) is None
    assert find_cause([Exit(0, 75, stopped=True), Exit(1, 0)], [[], []], asked=True) is None


def test_endings():
    assert [ending(code) for code in (0, 3, 128, 134, -9, -250)] == [
        "finished", "exit code 3", "exit code 128", "killed by SIGABRT", "killed by SIGKILL", "killed by signal 250",
    ]  # fmt: skip
