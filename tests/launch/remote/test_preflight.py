"""What is made of the answers of hosts: who takes part, who is replaced, what is told."""

import hashlib
import sys
from pathlib import Path

import pytest
from spmdkit.launch.remote import preflight
from spmdkit.launch.remote.connection import Refusal
from spmdkit.launch.remote.hosts import Host, Hosts
from spmdkit.launch.remote.preflight import (
    PACKAGES,
    HostUnavailable,
    Wanted,
    beside,
    choose,
    installed,
    prepare,
    shortcomings,
    unreachable,
)
from spmdkit.mesh.errors import UserError

ONE, TWO, SPARE = (Host(name=name, processes=2, python="python3", directory="/") for name in ("one", "two", "spare"))
GONE = Refusal("does not answer (timed out)", passing=True)
MISTAKE = Refusal("it refuses the login")


def wanted(**changed) -> Wanted:
    given = {"config": None, "run_dir": "runs/x", "gpus_per_process": 0, "simulate": False, "heartbeat": 30}
    return Wanted(**given | changed)


def good(**changed) -> dict:
    """The answer of a host that has everything."""
    return {
        "python": list(sys.version_info[:3]),
        "spmdkit": True,
        "versions": {name: installed(name) for name in PACKAGES},
        "addresses": {"one": "10.0.0.1", "two": "10.0.0.2", "spare": "10.0.0.3"},
        "directory": "/",
        "marker": True,
        "writable": True,
        "config": None,
        "gpus": 0,
        "machine": "a",
        "port": 5000,
        **changed,
    }


def told(answer: dict, host: Host = ONE, **changed) -> str:
    return "\n".join(shortcomings(host, answer, wanted(**changed)))


def test_a_host_that_has_everything():
    assert told(good()) == ""


def test_what_a_host_lacks(tmp_path):
    config = tmp_path / "my.yaml"
    config.write_text("train: {}")
    assert "python3 is Python 3.9.2; spmdkit needs 3.11 or newer." in told(good(python=[3, 9, 2]))
    assert "python3 has no spmdkit. Install it there" in told(good(spmdkit=False))
    other = good(versions={**good()["versions"], "jax": "0.1", "jaxlib": None})
    assert f"it has jax 0.1, here is {installed('jax')}. All hosts need the same" in told(other)
    assert f"it has jaxlib none, here is {installed('jaxlib')}." in told(other)
    assert "there is no folder / (gone). Set directory" in told({**good(directory=None, reason="gone")})
    assert f"the config {config} is not there, seen from /." in told(good(), config=str(config))
    assert f"the config {config} is another file there" in told(good(config="0"), config=str(config))
    same = good(config=hashlib.sha256(b"train: {}").hexdigest())
    assert told(same, config=str(config)) == ""
    assert "run.dir runs/x is not the folder of this machine" in told(good(marker=False))
    assert "run.dir runs/x may not be written there." in told(good(writable=False))


def test_gpus():
    assert "2 processes x 4 GPUs = 8, but it has 4." in told(good(gpus=4), gpus_per_process=4)
    assert told(good(gpus=8), gpus_per_process=4) == ""
    assert told(good(gpus=0), gpus_per_process=4) == "", "they may be of another maker"
    assert told(good(gpus=4)) == ""
    assert "its 5 GPUs cannot be divided among 2 processes." in told(good(gpus=5))
    assert told(good(gpus=5), simulate=True) == ""


def test_the_coordinators_address():
    assert unreachable("one", good(), good(), several=True) == []
    (problem,) = unreachable("three", good(), good(), several=True)
    assert "it does not know the name three of the first host" in problem
    loops = good(addresses={"one": "127.0.1.1"})
    assert unreachable("one", loops, good(), several=False) == [], "two names of one machine"
    (problem,) = unreachable("one", {**loops, "machine": "b"}, good(), several=True)
    assert problem.startswith("it takes one, the first host, for itself (127.0.1.1). Give the first host")


def test_rejects_a_first_host_that_only_listens_on_loopback():
    answers = {ONE.key: good(addresses={"one": "127.0.1.1"}), TWO.key: good(machine="b")}
    (problem,) = preflight._problems([ONE, TWO], [ONE, TWO], answers, wanted())
    assert problem.startswith("one: it resolves its own name one to 127.0.1.1, where the other hosts cannot reach it.")


def test_a_spare_takes_the_place_of_a_host_that_does_not_answer():
    lines = []
    big = Host(name="two", processes=5)
    found = choose([ONE, big], [SPARE], {ONE.key: good(), big.key: GONE, SPARE.key: good()}, lines.append)
    chosen, left, unanswered = found
    assert [(host.name, host.processes) for host in chosen] == [("one", 2), ("spare", 5)]
    assert (left, unanswered) == ((), [])
    assert lines == ["host two does not answer (timed out): spare takes its place"]


def test_no_spare_is_left():
    answers = {ONE.key: GONE, TWO.key: GONE, SPARE.key: good()}
    chosen, _, unanswered = choose([ONE, TWO], [SPARE], answers)
    assert [host.name for host in chosen] == ["spare", "two"]
    assert unanswered == ["host two does not answer (timed out)"]
    assert choose([ONE], [SPARE], {ONE.key: GONE, SPARE.key: GONE})[2] == ["host one does not answer (timed out)"]
    assert choose([ONE], [SPARE], {ONE.key: MISTAKE, SPARE.key: good()})[0] == (ONE,), "a mistake is told"


@pytest.fixture
def hosts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Hosts(hosts=(ONE, TWO), spares=(SPARE,), source=Path("hosts.yaml"))


def prepared(hosts, monkeypatch, **answers):
    """The outcome of a preflight whose hosts give these answers."""
    by_key = {(name, 0): answer for name, answer in answers.items()}
    monkeypatch.setattr(preflight, "ask", lambda *_: by_key)
    return prepare(hosts, wanted(), lambda line: None)


def test_all_mistakes_of_all_hosts_at_once(hosts, monkeypatch):
    with pytest.raises(UserError) as raised:
        prepared(hosts, monkeypatch, one=good(spmdkit=False), two=MISTAKE, spare=good(marker=False))
    first, *rest = str(raised.value).splitlines()
    assert first == "3 problems with the hosts of hosts.yaml:"
    assert [line.split(":")[0] for line in rest] == ["  one", "  two", "  spare"]


def test_mistakes_go_before_a_host_that_does_not_answer(hosts, monkeypatch):
    with pytest.raises(UserError, match="1 problem with the hosts"):
        prepared(hosts, monkeypatch, one=good(), two=GONE, spare=MISTAKE)
    with pytest.raises(HostUnavailable, match=r"^host two does not answer \(timed out\)$") as raised:
        prepared(hosts, monkeypatch, one=good(), two=GONE, spare=GONE)
    assert raised.value.exit_code == 75


def test_the_port_is_one_of_the_first_host(hosts, monkeypatch):
    found = prepared(hosts, monkeypatch, one=GONE, two=good(port=1), spare=good(port=2))
    assert [host.name for host in found.hosts] == ["spare", "two"]
    assert (found.spares, found.port) == ((), 2)


def test_the_mark_stands_beside_the_run_and_goes_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with beside(Path("runs/x")) as mark:
        assert not mark.is_absolute()
        assert mark.is_file()
        assert mark.parent == Path()
    (tmp_path / "runs/x").mkdir(parents=True)
    with beside(tmp_path / "runs/x") as mark:
        assert mark.parent == tmp_path / "runs/x"
    assert not list((tmp_path / "runs/x").iterdir())
