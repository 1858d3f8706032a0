"""How ssh is called, and what its errors mean."""

import shlex
import subprocess
from pathlib import Path

import pytest
from spmdkit.launch.remote.connection import quoted_path, refusal, ssh_command
from spmdkit.launch.remote.hosts import Host, Hosts


def command(host: Host, *ssh: str, heartbeat: float = 30) -> list[str]:
    return ssh_command(Hosts(hosts=(host,), ssh=ssh, source=Path("hosts.yaml")), host, heartbeat)


def test_the_hosts_own_options_come_first():
    words = command(Host(name="me@gpu1", port=2222, python="python3"), "-o", "ConnectTimeout=3")
    assert words[:3] == ["ssh", "-o", "ConnectTimeout=3"]
    assert words.index("ConnectTimeout=3") < words.index("ConnectTimeout=10")
    assert words[words.index("-p") + 1] == "2222"
    assert words[-3:-1] == ["--", "me@gpu1"]
    assert "BatchMode=yes" in words


def test_a_lost_host_is_noticed_before_the_others_abort():
    words = command(Host(name="gpu1", python="python3"), heartbeat=30)
    assert {"ServerAliveInterval=5", "ServerAliveCountMax=3"} <= set(words)
    assert "ServerAliveInterval=1" in command(Host(name="gpu1", python="python3"), heartbeat=3)


def test_the_command_there_is_one_for_any_shell(tmp_path):
    folder = tmp_path / "it's a $folder"
    folder.mkdir()
    (folder / "python").write_text('#!/bin/sh\necho "$0" "$#" "$1"\n')
    (folder / "python").chmod(0o755)
    there = command(Host(name="gpu1", python=str(folder / "python")))[-1]
    ended = subprocess.run(["/bin/sh", "-c", there], capture_output=True, text=True, check=True)
    assert ended.stdout == f"{folder}/python 2 -c\n"


def test_the_home_folder_there_is_meant():
    assert quoted_path("~/my venv/bin/python") == "~/'my venv/bin/python'"
    assert shlex.split(quoted_path("/a b")) == ["/a b"]


MISTAKES = {
    "ssh: Could not resolve hostname gpu1: Name or service not known": "its name is not known here",
    "No ED25519 host key is known for x and you have requested strict checking.\nHost key verification failed.": (
        "its key is not known here. Connect once by hand"
    ),
    "me@gpu1: Permission denied (publickey).": "it refuses the login. Put your public key",
    "command-line: line 0: Bad configuration option: nosuch": "ssh does not know one of its options",
}


@pytest.mark.parametrize("said", MISTAKES)
def test_mistakes(said):
    found = refusal(255, said, "python3")
    assert found.message.startswith(MISTAKES[said])
    assert not found.passing


@pytest.mark.parametrize(
    "said", ["ssh: connect to host gpu1 port 22: Connection refused", "Connection timed out", "No route to host", ""]
)
def test_a_host_that_does_not_answer_may_do_so_later(said):
    found = refusal(255, said, "python3")
    assert found.passing
    assert found.message == f"does not answer ({said or 'nothing'})"


def test_python_that_is_not_there():
    found = refusal(127, "bash: line 1: exec: /x/python: not found", "/x/python")
    assert found.message.startswith("there is no /x/python (bash: line 1: exec: /x/python: not found). Set python")
    found = refusal(1, "Traceback\nAttributeError: 'file' object has no attribute 'buffer'", "python2")
    assert found.message.startswith("python2 cannot run there: it ended with exit code 1 and said: AttributeError")
    assert not found.passing
