"""The rendezvous with real sockets and one thread for each process."""

import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import pytest
from spmdkit.launch.startup import rendezvous
from spmdkit.launch.startup.addresses import Address, PortTaken, wait_until_listening
from spmdkit.launch.startup.rendezvous import Hello, announce_failure, decode, encode, join_rendezvous
from spmdkit.launch.startup.variables import Job
from spmdkit.launch.supervision.workers import free_port
from spmdkit.mesh.errors import UserError
from spmdkit.mesh.processes import ProcessesMissing
from support.processes import wait_for


class Ranks:
    """Concurrent calls of `join_rendezvous`."""

    def __init__(self, count: int) -> None:
        self.job = Job("test", Address("127.0.0.1", free_port()), count, 0)
        self.said: list[str] = []
        self.pool = ThreadPoolExecutor(16)
        self.options = {}

    def start(self, rank: int, *, seconds: float = 30, run: str = "runs/a", note=None, **changes) -> Future:
        job = self.job._replace(process_id=rank, **changes)
        return self.pool.submit(
            join_rendezvous, job, seconds=seconds, run=run, note=note, say=self.said.append, **self.options
        )

    def wait_until_here(self) -> None:
        """Waits until rank 0 listens."""
        wait_until_listening(self.job.address)

    def wait_until_said(self, words: str) -> None:
        wait_for(lambda: any(words in said for said in self.said), 30)


@pytest.fixture
def ranks(monkeypatch):
    for name, seconds in (("PROGRESS_SECONDS", 0.2), ("STATUS_SECONDS", 0.1), ("UNSURE_SECONDS", 1.0)):
        monkeypatch.setattr(rendezvous, name, seconds)
    return Ranks(3)


def test_releases_all_in_any_order_of_arrival(ranks):
    ranks.options = {"share": True}
    others = [ranks.start(rank, note={"of": rank}) for rank in (2, 1)]
    met = [ranks.start(0, note={"of": 0}).result(30), *(other.result(30) for other in others)]
    assert [each.hosts for each in met] == [[socket.gethostname()] * 3] * 3
    assert [[note["of"] for note in each.notes] for each in met] == [[0, 1, 2]] * 3
    assert [each.bind for each in met] == [ranks.job.address, None, None]
    with socket.socket() as jax:  # rank 0 has made place
        jax.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        jax.bind(("127.0.0.1", ranks.job.address.port))


def test_a_failed_check_refuses_all(ranks):
    def check(meeting):
        raise UserError(f"no, not {len(meeting.notes)}")

    ranks.options = {"check": check}
    for waiting in [ranks.start(rank) for rank in range(3)]:
        with pytest.raises(UserError, match="no, not 3"):
            waiting.result(30)


def test_reports_missing_ranks_while_waiting(ranks):
    met = [ranks.start(0)]
    ranks.wait_until_said("waiting for ranks 1 and 2 at 127.0.0.1:")
    met.append(ranks.start(1))
    ranks.wait_until_said("waiting for rank 2 at 127.0.0.1:")
    met.append(ranks.start(2))
    first, *others = [each.result(30) for each in met]
    assert len(first.notes) == 3
    assert [each.notes for each in others] == [[], []], "they are not shared"


@pytest.mark.parametrize(
    ("rank", "job", "says"),
    [
        (0, {"hosts": ("a", "b", "c")}, r"Ranks 1 and 2 on b, c did not come within 0 s \(timeouts.rendezvous\); 1 of"),
        (0, {"nodes": (socket.gethostname(), "b", "c")}, r"Ranks 1 and 2 \(nothing came from b, c\) did not come"),
        (1, {}, r"Rank 0 was not reachable at .* within 0 s .*: connection refused"),
    ],
)
def test_names_missing_ranks_at_the_timeout(ranks, rank, job, says):
    with pytest.raises(ProcessesMissing, match=says):
        ranks.start(rank, seconds=0.4, **job).result(30)
    assert any(f"waiting for rank{'s 1 and 2' if rank == 0 else ' 0'}" in said for said in ranks.said)


def test_waits_again_for_a_process_that_left(ranks):
    first = ranks.start(0)
    ranks.wait_until_here()
    hello = Hello("", "runs/a", 3, 1, "elsewhere", 7, {})
    with socket.create_connection(ranks.job.address) as connection:
        connection.sendall(encode(hello=hello._asdict()))
        answer = decode(connection.makefile("rb").readline())
        assert answer is not None
        assert answer["welcome"]
    ranks.wait_until_said("rank 1 (process 7 on elsewhere) has left before all were there")
    met = [first, ranks.start(1), ranks.start(2)]
    assert all(each.result(30) for each in met)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"run": "runs/b"}, r"belongs to another run \(runs/b \) than rank 0 at .* \(runs/a ; "),
        ({"identity": "stale"}, r"belongs to another run \(runs/a stale\) than"),
        ({"rank": 2}, "rank 2 is there twice: process"),
        ({"rank": 0, "num_processes": 3}, None),
    ],
    ids=["another run", "another attempt", "a rank twice", "rank 0 twice"],
)
def test_refuses_foreign_processes_only(ranks, changes, says):
    first = [ranks.start(0), ranks.start(2)]
    ranks.wait_until_said("waiting for rank 1 at")
    stranger = ranks.start(**{"rank": 1, **changes})
    if says is None:
        with pytest.raises(PortTaken, match="is in use on"):
            stranger.result(30)
    else:
        with pytest.raises(UserError, match=says):
            stranger.result(30)
        ranks.wait_until_said("refused a process")
    assert all(each.result(30) for each in [*first, ranks.start(1)])


@pytest.mark.slow_cases("numbers0", "numbers1")
@pytest.mark.parametrize("numbers", [(3, 4, 3), (2, 3, 3)])
def test_another_number_of_processes_refuses_all(ranks, numbers):
    before = time.monotonic()
    waiting = [ranks.start(rank, num_processes=number) for rank, number in enumerate(numbers)]
    for each in waiting[: min(numbers)]:
        with pytest.raises(UserError, match=r"has num_processes=\d, but rank 0 \(process \d+ on .*\) has \d: "):
            each.result(20)
    assert time.monotonic() - before < 15


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_process_that_cannot_start_refuses_all(ranks, failing, is_first):
    def fail():
        return ranks.pool.submit(
            announce_failure, ranks.job._replace(process_id=failing), "model.width=7", say=ranks.said.append
        )

    first = [fail()] if is_first else []
    others = [ranks.start(rank, seconds=20) for rank in range(3) if rank != failing]
    if not is_first:
        time.sleep(0.3)
        first = [fail()]
    for each in others:
        with pytest.raises(UserError, match=rf"^Rank {failing} \(process .*\) cannot start, .* can: model.width=7$"):
            each.result(15)
    first[0].result(15)


def test_refuses_only_its_own_processes_and_only_for_a_while(ranks, monkeypatch):
    monkeypatch.setattr(rendezvous, "REFUSING_SECONDS", 2.5)
    failing = ranks.pool.submit(announce_failure, ranks.job, "model.width=7", say=ranks.said.append)
    ranks.wait_until_here()
    stranger = ranks.start(1, identity="stale", seconds=1)
    with pytest.raises(PortTaken, match="a program that is not rank 0 of this run answers"):
        stranger.result(15)
    failing.result(10)


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\n",
        b"{}\n",
        b"[" * 100_000 + b"\n",
        encode(hello={"rank": 1}),
        encode(hello=Hello("", "runs/a", 3, "1", "h", 1, {})._asdict()),  # pyright: ignore[reportArgumentType]
    ],
)
def test_ignores_foreign_connections(ranks, words):
    first = ranks.start(0)
    ranks.wait_until_here()
    with socket.create_connection(ranks.job.address) as stranger:
        stranger.sendall(words)
        assert all(each.result(30) for each in [first, ranks.start(1), ranks.start(2)])


def test_a_client_that_drips_bytes_does_not_block_the_others(ranks, monkeypatch):
    monkeypatch.setattr(rendezvous, "READ_SECONDS", 0.3)
    first = ranks.start(0)
    ranks.wait_until_here()
    with socket.create_connection(ranks.job.address) as stranger:
        met = threading.Event()

        def drip():
            with suppress(OSError):
                while not met.wait(0.05):
                    stranger.sendall(b"[")

        dripping = threading.Thread(target=drip)
        dripping.start()
        time.sleep(0.2)  # rank 0 reads
        try:
            assert all(each.result(20) for each in [first, ranks.start(1), ranks.start(2)])
        finally:
            met.set()
            dripping.join()


def test_drops_idle_connections(ranks, monkeypatch):
    monkeypatch.setattr(rendezvous, "FOREIGN_SECONDS", 0.2)
    first = ranks.start(0)
    ranks.wait_until_here()
    with socket.create_connection(ranks.job.address, timeout=10) as stranger:
        assert stranger.recv(1) == b""
    assert all(each.result(30) for each in [first, ranks.start(1), ranks.start(2)])


@pytest.mark.slow_cases("nothing")
@pytest.mark.parametrize("greeting", [b"\x00\x00\x06\x04\x00", b"SSH-2.0\r\n", b""], ids=["HTTP/2", "SSH", "nothing"])
def test_reports_another_program_at_the_address(ranks, greeting, monkeypatch):
    monkeypatch.setattr(rendezvous, "FOREIGN_SECONDS", 0.3)
    monkeypatch.setattr(rendezvous, "SILENT_SECONDS", 1.0)
    server, connections = socket.create_server(("127.0.0.1", ranks.job.address.port)), []

    def answer():
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            connections.append(connection)
            connection.sendall(greeting)
            if greeting:
                connection.close()

    threading.Thread(target=answer, daemon=True).start()
    with server, pytest.raises(PortTaken, match="a program that is not rank 0 of this run answers there"):
        ranks.start(1, seconds=20).result(30)
    for connection in connections:
        connection.close()


def test_two_foreign_programs_with_a_free_port_between_them_are_not_one(ranks):
    waiting = rendezvous.Participant(ranks.job, Hello("", "", 3, 1, "here", 7, {}), 20, ranks.said.append)
    waiting._foreign_since = time.monotonic() - 60
    assert waiting._connect() is None
    waiting._check_foreign()  # raises for the same program


@pytest.mark.parametrize("rank", [0, 1])
def test_rejects_an_unknown_host(ranks, rank):
    unknown = Address("no-such-host.invalid", 80)
    with pytest.raises(UserError, match=r"host 'no-such-host.invalid' \(SPMDKIT_JOB_ADDRESSES\) is unknown on"):
        ranks.start(rank, seconds=0.1, address=unknown, variables={"address": "SPMDKIT_JOB_ADDRESSES"}).result(60)


def test_waits_for_a_name_in_kubernetes(ranks, monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert rendezvous.name_timeout(ranks.job._replace(source="Kubernetes"), 300) == 300
    assert rendezvous.name_timeout(ranks.job, 300) == rendezvous.UNKNOWN_SECONDS
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert rendezvous.name_timeout(ranks.job, 300) == 300
