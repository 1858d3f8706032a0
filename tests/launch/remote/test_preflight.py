"""The command line of ssh, its errors, and the selection of hosts by their answers."""

import hashlib
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from spmdkit.launch.remote import preflight
from spmdkit.launch.remote.hosts import Host, Hosts
from spmdkit.launch.remote.preflight import (
    PACKAGES,
    HostUnavailable,
    Refusal,
    Requirements,
    check_coordinator,
    check_host,
    create_marker,
    explain_failure,
    installed_version,
    list_problems,
    quote_path,
    replace_hosts,
    select_hosts,
    ssh_command,
)
from spmdkit.mesh.errors import UserError

ONE, TWO, SPARE = (Host(name=name, processes=2, python="python3", directory="/") for name in ("one", "two", "spare"))
GONE = Refusal("does not answer (timed out)", is_temporary=True)
MISTAKE = Refusal("it refuses the login")


def wanted(**changed) -> Requirements:
    given = {"config": None, "run_dir": "runs/x", "gpus_per_process": 0, "simulate": False, "heartbeat": 30}
    return Requirements(**given | changed)


def good(**changed) -> dict:
    """The answer of a host that has everything."""
    return {
        "python": list(sys.version_info[:3]),
        "spmdkit": True,
        "versions": {name: installed_version(name) for name in PACKAGES},
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
    return "\n".join(check_host(host, answer, wanted(**changed)))


def test_accepts_a_complete_host():
    assert told(good()) == ""


def test_reports_unmet_requirements(tmp_path):
    config = tmp_path / "my.yaml"
    config.write_text("train: {}")
    assert "python3 is Python 3.9.2; spmdkit needs 3.11 or newer." in told(good(python=[3, 9, 2]))
    assert "python3 lacks spmdkit. Install it there" in told(good(spmdkit=False))
    other = good(versions={**good()["versions"], "jax": "0.1", "jaxlib": None})
    assert f"jax is 0.1 there and {installed_version('jax')} here. All hosts need the same" in told(other)
    assert f"jaxlib is missing there and {installed_version('jaxlib')} here." in told(other)
    assert "missing directory / (gone). Set directory" in told({**good(directory=None, reason="gone")})
    assert f"the config {config} is missing there, relative to /." in told(good(), config=str(config))
    assert f"the config {config} is a different file there" in told(good(config="0"), config=str(config))
    same = good(config=hashlib.sha256(b"train: {}").hexdigest())
    assert told(same, config=str(config)) == ""
    assert "run.dir runs/x is not the directory of this machine" in told(good(marker=False))
    assert "run.dir runs/x is not writable there." in told(good(writable=False))


def test_reports_too_few_gpus():
    assert "2 processes x 4 GPUs = 8, but it has 4." in told(good(gpus=4), gpus_per_process=4)
    assert told(good(gpus=8), gpus_per_process=4) == ""
    assert told(good(gpus=0), gpus_per_process=4) == "", "they may be of another maker"
    assert told(good(gpus=4)) == ""
    assert "its 5 GPUs cannot be divided among 2 processes." in told(good(gpus=5))
    assert told(good(gpus=5), simulate=True) == ""


def test_check_coordinator():
    assert check_coordinator("one", good(), good(), several=True) == []
    (problem,) = check_coordinator("three", good(), good(), several=True)
    assert "it cannot resolve the name three of the first host" in problem
    loops = good(addresses={"one": "127.0.1.1"})
    assert check_coordinator("one", loops, good(), several=False) == [], "two names of one machine"
    (problem,) = check_coordinator("one", {**loops, "machine": "b"}, good(), several=True)
    assert problem.startswith("it resolves one, the first host, to itself (127.0.1.1). Set an address")


def test_rejects_a_first_host_that_only_listens_on_loopback():
    answers = {ONE.key: good(addresses={"one": "127.0.1.1"}), TWO.key: good(machine="b")}
    (problem,) = list_problems([ONE, TWO], [ONE, TWO], answers, wanted())
    assert problem.startswith("one: it resolves its own name one to 127.0.1.1, which the other hosts cannot reach.")


def test_spare_replaces_a_host_that_does_not_answer(capsys):
    big = Host(name="two", processes=5)
    found = replace_hosts([ONE, big], [SPARE], {ONE.key: good(), big.key: GONE, SPARE.key: good()})
    chosen, left, unanswered = found
    assert [(host.name, host.processes) for host in chosen] == [("one", 2), ("spare", 5)]
    assert (left, unanswered) == ((), [])
    assert capsys.readouterr().err == "spmdkit launch: host two does not answer (timed out): spare replaces it\n"


def test_reports_hosts_without_a_replacement():
    answers = {ONE.key: GONE, TWO.key: GONE, SPARE.key: good()}
    chosen, _, unanswered = replace_hosts([ONE, TWO], [SPARE], answers)
    assert [host.name for host in chosen] == ["spare", "two"]
    assert unanswered == ["host two does not answer (timed out)"]
    assert replace_hosts([ONE], [SPARE], {ONE.key: GONE, SPARE.key: GONE})[2] == [
        "host one does not answer (timed out)"
    ]
    assert replace_hosts([ONE], [SPARE], {ONE.key: MISTAKE, SPARE.key: good()})[0] == (ONE,), "a mistake is told"


@pytest.fixture
def hosts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Hosts(hosts=(ONE, TWO), spares=(SPARE,), source=Path("hosts.yaml"))


def prepared(hosts, monkeypatch, **answers):
    """The outcome of a preflight whose hosts give these answers."""
    by_key = {(name, 0): answer for name, answer in answers.items()}
    monkeypatch.setattr(preflight, "ask", lambda *_: by_key)
    return select_hosts(hosts, wanted())


def test_reports_problems_of_all_hosts(hosts, monkeypatch):
    with pytest.raises(UserError) as raised:
        prepared(hosts, monkeypatch, one=good(spmdkit=False), two=MISTAKE, spare=good(marker=False))
    first, *rest = str(raised.value).splitlines()
    assert first == "3 problems with the hosts of hosts.yaml:"
    assert [line.split(":")[0] for line in rest] == ["  one", "  two", "  spare"]


def test_problems_come_before_unavailable_hosts(hosts, monkeypatch):
    with pytest.raises(UserError, match="1 problem with the hosts"):
        prepared(hosts, monkeypatch, one=good(), two=GONE, spare=MISTAKE)
    with pytest.raises(HostUnavailable, match=r"^host two does not answer \(timed out\)$") as raised:
        prepared(hosts, monkeypatch, one=good(), two=GONE, spare=GONE)
    assert raised.value.exit_code == 75


def test_port_is_that_of_the_first_host(hosts, monkeypatch):
    found = prepared(hosts, monkeypatch, one=GONE, two=good(port=1), spare=good(port=2))
    assert [host.name for host in found.hosts] == ["spare", "two"]
    assert (found.spares, found.port) == ((), 2)


def test_marker_is_temporary(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with create_marker(Path("runs/x")) as mark:
        assert not mark.is_absolute()
        assert mark.is_file()
        assert mark.parent == Path()
    (tmp_path / "runs/x").mkdir(parents=True)
    with create_marker(tmp_path / "runs/x") as mark:
        assert mark.parent == tmp_path / "runs/x"
    assert not list((tmp_path / "runs/x").iterdir())


def command(host: Host, *ssh: str, heartbeat: float = 30) -> list[str]:
    return ssh_command(Hosts(hosts=(host,), ssh=ssh, source=Path("hosts.yaml")), host, heartbeat)


def test_options_of_the_file_come_first():
    words = command(Host(name="me@gpu1", port=2222, python="python3"), "-o", "ConnectTimeout=3")
    assert words[:3] == ["ssh", "-o", "ConnectTimeout=3"]
    assert words.index("ConnectTimeout=3") < words.index("ConnectTimeout=10")
    assert words[words.index("-p") + 1] == "2222"
    assert words[-3:-1] == ["--", "me@gpu1"]
    assert "BatchMode=yes" in words


def test_ssh_detects_a_lost_host_before_the_heartbeat():
    words = command(Host(name="gpu1", python="python3"), heartbeat=30)
    assert {"ServerAliveInterval=5", "ServerAliveCountMax=3"} <= set(words)
    assert "ServerAliveInterval=1" in command(Host(name="gpu1", python="python3"), heartbeat=3)


def test_command_is_quoted_for_a_shell(tmp_path):
    folder = tmp_path / "it's a $folder"
    folder.mkdir()
    (folder / "python").write_text('#!/bin/sh\necho "$0" "$#" "$1"\n')
    (folder / "python").chmod(0o755)
    there = command(Host(name="gpu1", python=str(folder / "python")))[-1]
    ended = subprocess.run(["/bin/sh", "-c", there], capture_output=True, text=True, check=True)
    assert ended.stdout == f"{folder}/python 2 -c\n"


def test_quote_path_keeps_the_home_directory():
    assert quote_path("~/my venv/bin/python") == "~/'my venv/bin/python'"
    assert shlex.split(quote_path("/a b")) == ["/a b"]


MISTAKES = {
    "ssh: Could not resolve hostname gpu1: Name or service not known": "its name cannot be resolved",
    "No ED25519 host key is known for x and you have requested strict checking.\nHost key verification failed.": (
        "its key is unknown. Connect once by hand"
    ),
    "me@gpu1: Permission denied (publickey).": "it refuses the login. Add your public key",
    "command-line: line 0: Bad configuration option: nosuch": "ssh rejects one of its options",
}


@pytest.mark.parametrize("said", MISTAKES)
def test_mistakes(said):
    found = explain_failure(255, said, "python3")
    assert found.message.startswith(MISTAKES[said])
    assert not found.is_temporary


@pytest.mark.parametrize(
    "said", ["ssh: connect to host gpu1 port 22: Connection refused", "Connection timed out", "No route to host", ""]
)
def test_a_host_that_does_not_answer_may_do_so_later(said):
    found = explain_failure(255, said, "python3")
    assert found.is_temporary
    assert found.message == f"does not answer ({said or 'no message'})"


def test_explains_a_missing_python():
    found = explain_failure(127, "bash: line 1: exec: /x/python: not found", "/x/python")
    assert found.message.startswith("there is no /x/python (bash: line 1: exec: /x/python: not found). Set python")
    found = explain_failure(1, "Traceback\nAttributeError: 'file' object has no attribute 'buffer'", "python2")
    assert found.message.startswith("python2 cannot run there: it ended with exit code 1: AttributeError")
    assert not found.is_temporary
