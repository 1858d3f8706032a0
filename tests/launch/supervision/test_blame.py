"""The cause of a failure, from exits and output; `tests/faults/test_death.py` uses real processes."""

import signal
from pathlib import Path

import pytest
from spmdkit.launch.supervision.blame import Cause, Exit, Outcome, describe_end, find_cause, summarize
from spmdkit.launch.supervision.process_state import FROZEN, RUNS, STOPPED
from spmdkit.runtime.guards.progress_notes import Note, verdict, without_service

GLOO = ["Traceback (most recent call last):", "jax.errors.JaxRuntimeError: INTERNAL: Gloo all-reduce failed: closed"]
LOST = ["error: This process has lost another one of its run: JaxRuntimeError: Gloo AllGather failed: closed by peer"]
SERVICE = ["F1122 client.h:86] Terminating process because the JAX distributed service detected fatal errors."]
SIZES = ["terminate called after throwing an instance of 'gloo::EnforceNotMet'", "  what():  [enforce fail at x]"]
HOST = ["error: the connection to host b was lost"]
BOOM = ["Traceback (most recent call last):", "  raise", "RuntimeError: boom"]


def blame(exits, tails, states=None) -> Cause:
    cause = find_cause(exits, tails, states or {})
    assert cause is not None
    return cause


def told(*notes, silent=()) -> list[str]:
    return [f"error: {verdict(notes, silent, 3.0)}"]


@pytest.mark.parametrize(
    ("exits", "tails", "rank", "code"),
    [
        ([Exit(1, -9), Exit(0, 1)], [GLOO, []], 1, 75),
        ([Exit(0, 1), Exit(1, -9)], [GLOO, []], 1, 75),
        ([Exit(0, 1), Exit(1, -9)], [GLOO, GLOO], 1, 75),
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
def test_first_own_exit_is_the_cause(exits, tails, rank, code):
    cause = blame(exits, tails)
    assert (cause.rank, cause.exit_code, cause.witness) == (rank, code, rank)


NO_SERVICE = [f"error: {without_service(Note(7, 'step', 4), 1, 3.0, 'timeouts.step')}"]
BEHIND = told(Note(7, "step", 4), Note(6, "data", 4))


@pytest.mark.parametrize(
    ("said", "rank"),
    [
        (BEHIND, 1),
        (told(Note(7, "step", 4), Note(7, "step", 1), silent=[1]), 1),
        (told(Note(7, "step", 4), None, silent=[1]), 1),
        (told(Note(7, "step", 4), Note(6, "data", 4), Note(6, "data", 4), Note(6, "data", 4)), 1),
        (["error: Rank 1 on node-b did not come within 20 s (timeouts.rendezvous); 1 of 2 processes did."], 1),
        (["error: Ranks 1, 2 and 3 (nothing came from b) did not come within 20 s (timeouts.rendezvous);"], 1),
        (["error: rank 1 did not come to 'config' within 20 s (timeouts.rendezvous); 1 of 2 processes did."], 1),
        (NO_SERVICE, 0),
    ],
)
def test_rank_named_by_a_witness_is_the_cause(said, rank):
    tails = [[], [], [], []]
    tails[1 - rank] = said
    cause = blame([Exit(1 - rank, 75), Exit(rank, -9, stopped=True)], tails)
    assert (cause.rank, cause.exit_code, cause.witness) == (rank, 75, 1 - rank)
    assert f"according to rank {1 - rank}" in cause.how


def test_named_rank_is_its_own_witness_if_it_ended():
    cause = blame([Exit(0, 75), Exit(1, 75)], [BEHIND, BEHIND])
    assert (cause.rank, cause.witness) == (1, 1)


IN_ONE_PLACE = told(Note(7, "step", 4), Note(7, "step", 4))
OF_ANOTHER_RUN = ["error: Rank 5 did not come within 20 s (timeouts.x);"]
GOT = ["got SIGTERM: all processes of the run stop after the same step"]


@pytest.mark.parametrize(
    "tails",
    [
        [IN_ONE_PLACE] * 2,
        [OF_ANOTHER_RUN] * 2,
        [LOST, [*GOT, "ended by SIGTERM; the same command resumes"]],  # a second signal
    ],
)
def test_first_exit_counts_if_no_rank_is_named(tails):
    cause = blame([Exit(1, 75), Exit(0, 75)], tails)
    assert (cause.rank, cause.how.partition(",")[0]) == (1, "exit code 75")


def test_ranks_in_different_places_are_both_candidates():
    ahead = Note(8, "evaluation", 9, 2, "measure (parallel/step/train_step.py)")
    said = told(ahead, Note(8, "step", 9, 0, "_wait_for_oldest (training/steps/late_log.py)"))
    cause = blame([Exit(1, 75), Exit(0, 75)], [said, said])
    assert (cause.candidates, cause.exit_code, cause.witness) == ((0, 1), 75, 1)
    assert cause.how.startswith("they wait for each other in different places: rank 0 at step 8, evaluation after 2")
    assert "; rank 1 at step 8, step, for 9 s, in _wait_for_oldest" in cause.how
    killed = blame([Exit(1, 75), Exit(0, -9)], [said, said])
    assert (killed.rank, killed.candidates) == (0, ())


BITS = [
    "error: Step 8: devices that hold copies of the same array hold other bits:",
    "  params/layers/0/kernel: cpu:2049 (rank 1) has other bits than cpu:0 (rank 0), cpu:1 (rank 0), cpu:2048 (rank 1)",
    "The latest checkpoint is older, and its copies were equal.",
]
TIE = "  params/w: cpu:0 (rank 0), cpu:2048 (rank 1) differ from each other; with no majority, any may be at fault"
UNDECIDED = [BITS[0], TIE]


@pytest.mark.parametrize(
    ("tails", "rank", "how", "candidates"),
    [
        ([[], GOT], 1, "got SIGTERM, and all stopped after one step", ()),
        ([BITS, BITS], 1, "its device holds other bits of an array than the other copies", ()),
        ([UNDECIDED, UNDECIDED], 0, "their devices hold other bits of an array than the other copies", (0, 1)),
    ],
)
def test_cause_of_a_common_end(tails, rank, how, candidates):
    cause = blame([Exit(0, 75), Exit(1, 75)], tails)
    assert (cause.rank, cause.how, cause.exit_code, cause.candidates) == (rank, how, 75, candidates)
    killed = blame([Exit(0, -9), Exit(1, 75)], tails)
    assert killed.how == "killed by SIGKILL"


@pytest.mark.parametrize("state", [STOPPED, FROZEN])
def test_process_that_cannot_run_is_the_cause(state):
    cause = blame([Exit(0, 75), Exit(1, -9, stopped=True)], [LOST, []], {1: state})
    assert (cause.rank, cause.exit_code) == (1, 75)
    assert cause.how == f"{state}, which blocked the others"


HEARTBEAT = [SERVICE[0] + " absl::Status: DEADLINE_EXCEEDED: Deadline Exceeded", "", "RPC: /xla.coordination.Coordi"]
HEARTBEAT[-1] += "nationService/Heartbeat"
REFUSED = [HEARTBEAT[0].replace("DEADLINE_EXCEEDED: Deadline Exceeded", "UNAVAILABLE: Socket closed"), *HEARTBEAT[1:]]
UNHEALTHY = [SERVICE[0] + " UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):", "1"]
SILENT = told(Note(7, "step", 4), Note(7, "step", 1), silent=[1])
SILENT_OF_THREE = told(Note(7, "step", 4), Note(7, "step", 1), Note(7, "step", 4), silent=[1])


@pytest.mark.parametrize(
    ("tails", "running", "candidates", "said"),
    [
        ([UNHEALTHY, []], [1], (0, 1), "the network between them lost their messages, though the processes ran"),
        ([[], HEARTBEAT], [0], (0, 1), "the network between them"),
        ([SILENT, NO_SERVICE], [], (0, 1), "the network between them"),
        ([UNHEALTHY, HEARTBEAT], [], (0, 1), "the network between them"),
        ([SILENT_OF_THREE, NO_SERVICE, []], [], (1,), "the network lost its messages to and from rank 0"),
        ([UNHEALTHY, [], UNHEALTHY], [1], (1,), "the network lost its messages to and from rank 0"),
        ([[], HEARTBEAT, HEARTBEAT], [0], (0,), "the network lost its messages to and from the others"),
        ([[], HEARTBEAT, []], [0, 2], (0, 1), "the network between them"),
        ([UNHEALTHY, []], [], (1,), "rank 0: it sends no heartbeats, so it is stopped, frozen, dead, or cut off"),
        ([[], HEARTBEAT], [], (0,), "rank 1: it is stopped, frozen or dead, or the network between it and rank 1"),
        ([SILENT, []], [1], (1,), "so Python's lock is held there, or the network loses its messages"),
        ([SILENT, REFUSED], [], (1,), "according to rank 0"),
    ],
)  # fmt: skip
def test_the_network_is_blamed_if_both_processes_ran(tails, running, candidates, said):
    ended = [Exit(rank, 75 if "error: " in tail[0] else -6) for rank, tail in enumerate(tails) if tail]
    cause = blame(ended, tails, dict.fromkeys(running, RUNS))
    assert (cause.candidates or (cause.rank,)) == candidates
    assert said in cause.how
    assert cause.exit_code == 75


def test_signals_and_success_have_no_cause():
    assert find_cause([Exit(0, 0), Exit(1, 0)], [[], []]) is None
    assert find_cause([Exit(0, -15, stopped=True)], [[]], was_asked=True) is None
    ended = (Exit(0, 75, stopped=True), Exit(1, 0))
    assert [Outcome(ended, asked, ([], [])).cause is None for asked in (signal.SIGTERM, None)] == [True, False]


def test_describe_end():
    assert [describe_end(code) for code in (0, 3, 128, 134, -9, -250)] == [
        "finished", "exit code 3", "exit code 128", "killed by SIGABRT", "killed by SIGKILL", "killed by signal 250",
    ]  # fmt: skip


LOGS = Path("runs/a/logs")


def test_summary_prints_the_error_and_one_line():
    exits = (Exit(1, 1), Exit(0, -15, stopped=True))
    lines = summarize(Outcome(exits, None, ([], ["Traceback (most recent call last):", "E: boom"])), LOGS)
    assert lines == [
        "  Traceback (most recent call last):",
        "  E: boom",
        "rank 1 failed first: exit code 1. Its last lines are above, all of them in runs/a/logs/rank-1.log; "
        "rank 0 killed by SIGTERM (stopped by the launcher)",
    ]


def test_summary_names_the_exit_code_if_it_differs():
    lines = summarize(Outcome((Exit(0, 75), Exit(1, -11)), None, (LOST, [])), LOGS)
    assert lines == [
        "rank 1 failed first: killed by SIGSEGV (exit code 75). It printed nothing; rank 0 exit code 75 "
        "(it lost another process)"
    ]


def test_summary_names_all_candidates():
    said = [
        "error: No progress for more than 6 s (timeouts.step): all ranks wait for their devices, but not in the same "
        "place: rank 0 at step 8, evaluation, for 9 s; rank 1 at step 8, step, for 9 s. See the stacks in their logs."
    ]
    line = summarize(Outcome((Exit(1, 75), Exit(0, 75)), None, (said, said)), None)[-1]
    assert line.startswith(
        "ranks 0, 1 may have failed first, which cannot be determined: they wait for each other in different places: "
        "rank 0 at step 8, evaluation, for 9 s; rank 1 at step 8, step, for 9 s (exit code 75). "
    )


def test_summary_prints_the_lines_of_a_witness():
    said = ["error: No progress for more than 3 s (timeouts.step): rank 1 at step 6, data, for 4 s."]
    lines = summarize(Outcome((Exit(0, 75), Exit(1, -9, stopped=True)), None, (said, [])), None)
    assert lines == [
        f"  {said[0]}",
        "rank 1 failed first: blocked the others, according to rank 0 (exit code 75). The last lines of rank 0 are "
        "above; rank 0 exit code 75",
    ]


def test_summary_groups_other_ranks():
    def line(number):
        exits = (Exit(0, 2), *(Exit(rank, -15, stopped=True) for rank in range(number, 0, -1)))
        return summarize(Outcome(exits, None, (["error: no"],) * (number + 1)), None)[-1].partition("; ")[2]

    assert line(3) == "ranks 1, 2, 3 killed by SIGTERM (stopped by the launcher)"
    assert line(9) == "9 others killed by SIGTERM (stopped by the launcher)"


def test_summary_of_a_signal():
    outcome = Outcome((Exit(0, -15, stopped=True),), signal.SIGTERM, ([],))
    assert summarize(outcome, LOGS) == ["stopped by SIGTERM; the same command resumes the run"]
