"""The gate that every step passes: it closes at one step for all, whoever waits where."""

import os
import random
import signal
import threading
import time

import pytest
from spmdkit.launch.supervision.blame import Exit, find_cause
from spmdkit.mesh import processes as coordination
from spmdkit.training.stopping import gate as stopping
from spmdkit.training.stopping.gate import SIGNALS, Gate, stops_on_signals
from support.processes import wait_for


def test_processes_behind_continue_to_the_last_step():
    """Two hosts, one of them two steps ahead: both stop after the same step."""
    ahead, behind, trained = Gate(), Gate(), []
    for number in range(1, 8):
        assert ahead.passes(number)
    for number in range(1, 6):
        assert behind.passes(number)
    last = max(ahead.close(), behind.close())
    thread = threading.Thread(target=lambda: trained.append([n for n in range(6, 20) if behind.passes(n)]))
    thread.start()
    time.sleep(0.05)
    assert thread.is_alive(), "it waits until it is decided"
    for gate in (ahead, behind):
        gate.stop_after(last, "SIGTERM")
    thread.join(5)
    assert trained == [[6, 7]]
    assert not ahead.passes(8)
    assert (behind.reason, behind.is_closing) == ("SIGTERM", True)


def test_pause_comes_after_the_next_step():
    """Asked for when step 3 has started: in step 3 it would be too late for whoever has gone past it."""
    gate = Gate()
    assert all(gate.passes(number) for number in (1, 2, 3))
    gate.ask("save")
    gate.ask("evaluate")
    assert gate.asked_at(3) == []
    assert gate.passes(4)
    assert gate.asked_at(4) == ["save", "evaluate"]
    assert gate.passes(5)
    assert gate.asked_at(5) == []
    assert not gate.is_closing


def test_first_stop_request_wins():
    gate = Gate()
    gate.stop_after(7, "SIGTERM")
    for number, reason in ((5, "early stopping"), (5, "SIGHUP"), (9, "SIGINT")):
        gate.stop_after(number, reason)
    assert gate.reason == "early stopping"
    assert [gate.passes(number) for number in (5, 6)] == [True, False]


class Service:
    """JAX's coordination service, for several processes within this one."""

    def __init__(self):
        self.values = {}

    def key_value_set(self, key, value, allow_overwrite=False):
        assert allow_overwrite or key not in self.values
        self.values[key] = value

    def key_value_dir_get(self, folder):
        return [(key, value) for key, value in list(self.values.items()) if key.startswith(folder)]

    def key_value_delete(self, key):
        for each in [each for each in self.values if each == key or each.startswith(f"{key}/")]:
            del self.values[each]


@pytest.mark.parametrize("seed", range(20))
def test_processes_decide_the_same_in_any_order(seed, monkeypatch):
    """Steps, looks at the service, requests and a signal in an order of chance, and every look may be late."""
    chance, service, rank = random.Random(seed), Service(), [0]
    monkeypatch.setattr(stopping, "coordination_client", lambda: service)
    monkeypatch.setattr(stopping.jax, "process_index", lambda: rank[0])
    monkeypatch.setattr(stopping.jax, "process_count", lambda: 3)
    gates = [Gate() for _ in range(3)]
    sides = [stopping._Together(gate) for gate in gates]
    started, paused, over, asked, stops_at = [0, 0, 0], [{}, {}, {}], [False] * 3, 0, chance.randrange(100, 200)
    for turn in range(5000):
        rank[0] = chance.randrange(3)
        gate, side, kind = gates[rank[0]], sides[rank[0]], chance.random()
        if kind < 0.5 and not over[rank[0]] and not gate._undecided and started[rank[0]] < min(started) + 4:
            over[rank[0]] = not gate.passes(started[rank[0]] + 1)
            started[rank[0]] += not over[rank[0]]
            if gate.asked_at(started[rank[0]]):
                paused[rank[0]][started[rank[0]]] = gate.asked_at(started[rank[0]])
        elif 0.5 < kind < 0.52 and rank[0] == 0 and turn < 2500:
            gate.ask(f"request {asked}")
            asked += 1
        elif started[rank[0]] > stops_at and turn > 3000:
            side.ask("SIGTERM")
            stops_at = 10**9
        elif kind > 0.6:
            side._poll()
        if all(over):
            break
    assert all(over), "every gate opened again, and closed for good"
    assert started[0] == started[1] == started[2]
    assert paused[0] == paused[1] == paused[2]
    done = [text for step in sorted(paused[0]) for text in paused[0][step]]
    assert done == [f"request {number}" for number in range(len(done))]
    assert len(done) == asked > 5
    assert len(service.values) <= 8, "what is decided is forgotten"


@pytest.fixture
def three(monkeypatch):
    """Three processes of one service, each a thread: gives the sides, and what runs a function of a rank in all."""
    service, here = Service(), threading.local()
    for module in (stopping, coordination):
        monkeypatch.setattr(module, "coordination_client", lambda: service)
    monkeypatch.setattr(stopping.jax, "process_index", lambda: here.rank)
    monkeypatch.setattr(stopping.jax, "process_count", lambda: 3)
    sides = [stopping._Together(Gate()) for _ in range(3)]

    def in_ranks(*ranks, do):
        def run(rank):
            here.rank = rank
            do(rank)

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(5)
            assert not thread.is_alive()

    return sides, in_ranks


@pytest.mark.parametrize("heard", [(), (0,), (0, 0, 1), (0, 0, 1, 2, 0)], ids=str)
def test_all_processes_drop_the_same_requests(heard, three):
    """Of a request of before nobody does anything; one of after is done by all after the same step."""
    sides, in_ranks = three
    gates = [side._gate for side in sides]
    assert all(gate.passes(number) for gate in gates for number in range(1, 8))
    gates[0].ask('"old"')
    for rank in heard:
        in_ranks(rank, do=lambda rank: sides[rank]._poll())
    in_ranks(0, 1, 2, do=lambda rank: gates[rank].go_back(2, "back", 5))
    for turn in range(6):
        if turn == 3:
            gates[0].ask('"new"')
        in_ranks(0, 1, 2, do=lambda rank: sides[rank]._poll())
    in_ranks(0, 1, 2, do=lambda rank: [gates[rank].passes(number) for number in range(3, 10)])
    assert [[gate.asked_at(number) for number in range(10)] for gate in gates] == [
        [[], [], [], ['"new"'], [], [], [], [], [], []]
    ] * 3


def test_only_the_signaled_process_reports(three, capsys):
    """The launcher reads from it which rank was the reason."""
    sides, in_ranks = three
    in_ranks(1, do=lambda rank: sides[rank].ask("SIGTERM"))
    for _ in range(3):
        in_ranks(0, 1, 2, do=lambda rank: sides[rank]._poll())
    said = capsys.readouterr().err
    assert said == "got SIGTERM: all processes of the run stop after the same step\n"
    cause = find_cause([Exit(0, 75), Exit(1, 75)], [[], said.splitlines()])
    assert cause is not None
    assert cause.rank == 1


def test_one_stop_request_stops_all_that_go_back(three):
    sides, in_ranks = three
    gates = [side._gate for side in sides]
    assert all(gate.passes(number) for gate in gates for number in range(1, 8))
    in_ranks(1, do=lambda rank: sides[rank].ask("SIGTERM"))
    in_ranks(1, do=lambda rank: sides[rank]._poll())  # the others have not heard of it
    in_ranks(0, 1, 2, do=lambda rank: gates[rank].go_back(2, "back", 5))
    for _ in range(3):
        in_ranks(0, 1, 2, do=lambda rank: sides[rank]._poll())
    in_ranks(0, 1, 2, do=lambda rank: gates[rank].passes(3))
    assert [gate.passes(3) for gate in gates] == [False] * 3


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_signal_closes_the_gate_once(number):
    seen = []
    before = signal.signal(number, lambda *ignored: seen.append("theirs"))
    try:
        with stops_on_signals() as gate:
            assert gate.passes(1)
            os.kill(os.getpid(), number)
            wait_for(lambda: gate.reason)
            assert not gate.passes(2)
            assert (gate.reason, seen) == (number.name, [])
            os.kill(os.getpid(), number)
            wait_for(lambda: seen)
        assert signal.getsignal(number)(0, None) is None
        assert seen == ["theirs", "theirs"], "the handler of before is back"
    finally:
        signal.signal(number, before)


def test_ignored_signals_stay_ignored():
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stops_on_signals() as gate:
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.05)
            assert gate.passes(1)
            assert not gate.reason
    finally:
        signal.signal(signal.SIGHUP, before)


def test_other_threads_handle_no_signals():
    gates = []

    def run():
        with stops_on_signals() as gate:
            gates.append(gate.passes(1))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(5)
    assert gates == [True]
