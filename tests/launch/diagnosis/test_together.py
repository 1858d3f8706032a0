"""Doctors of several processes meet, in threads here, and compare."""

import socket
from concurrent.futures import ThreadPoolExecutor

from spmdkit.launch.diagnosis.finding import Finding
from spmdkit.launch.diagnosis.together import Compared, clocks, compare, mixed, names, oversubscribed
from spmdkit.mesh.joining.addresses import Address
from spmdkit.mesh.joining.detection import Job
from spmdkit.mesh.joining.meeting import Meeting


def free() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def meet(folders, count: int, seconds: float = 30.0) -> list[Compared]:
    job = Job("test", Address("127.0.0.1", free()), count, 0)

    def one(rank: int) -> Compared:
        own = [Finding("own", f"of {rank}")]
        versions = {"jax": "0.10.2" if rank else "0.10.1"}
        mine = job._replace(process_id=rank)
        options = {"seconds": seconds, "say": lambda line: None, "look_seconds": 0.3}
        return compare(mine, own, folders[rank], versions, {}, on_cpu=True, **options)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(len(folders))))


def test_all_know_what_all_have_found(tmp_path):
    found = meet([tmp_path, tmp_path], 2)
    assert [each.met for each in found] == [True, True]
    assert found[0].findings == found[1].findings
    first, second = found[0].findings
    assert (first[0].found, second[0].found) == ("of 0", "of 1")
    assert [finding.found for finding in first if finding.level == "wrong"] == [
        "jax: 0.10.1 on rank 0, 0.10.2 on rank 1"
    ]
    assert any(finding.found == f"all 2 processes see the same {tmp_path}" for finding in second)
    assert any(finding.found.startswith("all 2 have met: 2 on ") for finding in first)
    assert list(tmp_path.iterdir()) == []


def test_folders_that_are_not_the_same(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
    found = meet([tmp_path / "a", tmp_path / "b"], 2)
    assert all(
        any(finding.name == "shared" and finding.level == "wrong" for finding in each) for each in found[0].findings
    )


def test_one_is_missing(tmp_path):
    (found,) = meet([tmp_path], 2, seconds=0.4)
    assert not found.met
    assert found.findings[0][-1].level == "wrong"
    assert "Rank 1 did not come within 0 s" in found.findings[0][-1].found
    assert list(tmp_path.iterdir()) == []


def meeting(**changes) -> Meeting:
    notes = [{"own_ip": "10.0.0.1", "gpus": 2}] * 3
    return Meeting(["a", "a", "b"], notes, [0.0, 0.0, 0.0], None)._replace(**changes)


def test_clocks():
    assert [finding.level for finding in clocks(meeting())] == ["ok"]
    (found,) = clocks(meeting(skews=[0.0, 0.1, -90.0]))
    assert (found.level, found.found) == ("wrong", "against a: b -90 s")


def test_mixed_versions():
    assert mixed([{"versions": {"jax": "1"}}] * 2) == []
    (found,) = mixed([{"versions": {"jax": "1"}}, {}])
    assert found.found == "jax: 1 on rank 0, none on rank 1"


def test_names_of_hosts():
    assert names(meeting(), on_cpu=True) == []
    loopback = meeting(notes=[{"own_ip": "127.0.1.1"}] * 3)
    assert "resolves its own name to 127.0.1.1" in names(loopback, on_cpu=True)[0].found
    assert names(loopback, on_cpu=False) == []


def test_gpus_that_do_not_suffice():
    assert oversubscribed(meeting()) == []
    crowded = meeting(hosts=["a"] * 3)
    assert [finding.found for finding in oversubscribed(crowded)] == ["3 processes on a, for 2 GPUs"]
    bound = meeting(hosts=["a"] * 3, notes=[{"gpus": 1}] * 3)
    assert oversubscribed(bound) == []
