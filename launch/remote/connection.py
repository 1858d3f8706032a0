"""The command line of ssh, and what its errors mean."""

import shlex
from typing import NamedTuple

from .hosts import Host, Hosts

CONNECT_SECONDS = 10
BOOTSTRAP = (
    "import sys; sys.path = [each for each in sys.path if each]; "
    'exec(compile(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())), "agent", "exec"))'
)
"""What Python runs there: the text of agent.py, from stdin. The folder it starts in is no place for modules."""
FAILED = 255
"""Exit code of ssh where ssh itself has failed."""
NOT_FOUND = (126, 127)
"""Exit codes of a shell that cannot start a command."""


class Refusal(NamedTuple):
    """Why a host cannot take part.

    Attributes:
        message: What is wrong, and the remedy.
        passing: Whether the same command may work another time.
    """

    message: str
    passing: bool = False


def ssh_command(hosts: Hosts, host: Host, heartbeat: float) -> list[str]:
    """The command line that runs an agent on a host.

    Options of the hosts file come first: of two values ssh takes the first. An existing connection that is shared (as
    after a login with a second factor) is used, but none is opened: with it all others would end.

    Args:
        hosts: The hosts file.
        host: One of its hosts.
        heartbeat: Seconds without a sign of life after which the others count a process as dead.
    """
    interval = alive_interval(heartbeat)
    settings = {
        "BatchMode": "yes",
        "ConnectTimeout": CONNECT_SECONDS,
        "ServerAliveInterval": interval,
        "ServerAliveCountMax": 3,
        "ControlMaster": "no",
        "ForwardX11": "no",
        "ClearAllForwardings": "yes",
    }
    options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    port = ["-p", str(host.port)] if host.port else []
    agent = f"exec {quoted_path(host.python)} -c {shlex.quote(BOOTSTRAP)}"
    return ["ssh", *hosts.ssh, "-T", *options, *port, "--", host.name, agent]


def alive_interval(heartbeat: float) -> int:
    """Seconds between two questions to a host that says nothing; after three it is lost, before the others abort."""
    return max(1, int(heartbeat / 6))


def quoted_path(path: str) -> str:
    """A path as a word for a shell, which still replaces `~/` at its beginning."""
    return f"~/{shlex.quote(path[2:])}" if path.startswith("~/") else shlex.quote(path)


def refusal(code: int, said: str, python: str) -> Refusal:
    """Explains why no agent answered.

    Args:
        code: Exit code of ssh.
        said: Its stderr.
        python: The interpreter that was asked for there.
    """
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    last = lines[-1] if lines else "nothing"
    if code in NOT_FOUND:
        return Refusal(f"there is no {python} ({last}). Set python in the hosts file to the interpreter that is there.")
    if code != FAILED:
        return Refusal(f"{python} cannot run there: it ended with exit code {code} and said: {last}. {PYTHON_HINT}")
    for words, message in MISTAKES.items():
        if words in said:
            return Refusal(f"{message} ({last})")
    return Refusal(f"does not answer ({last})", passing=True)


PYTHON_HINT = "Set python in the hosts file to a Python that has spmdkit."
MISTAKES = {
    "Could not resolve hostname": "its name is not known here. Correct it in the hosts file, or in ~/.ssh/config",
    "REMOTE HOST IDENTIFICATION HAS CHANGED": "it has another key than before. Make sure that it is the host you mean, "
    "then remove the old one with ssh-keygen -R",
    "Host key verification failed": "its key is not known here. Connect once by hand and accept it: ssh asks no "
    "questions under a launcher",
    "Permission denied": "it refuses the login. Put your public key into ~/.ssh/authorized_keys there, unlock the "
    "private one with ssh-agent, or correct the user's name in the hosts file",
    "Bad configuration option": "ssh does not know one of its options. Correct ssh in the hosts file",
    "unknown option": "ssh does not know one of its options. Correct ssh in the hosts file",
    "Bad owner or permissions": "ssh does not trust its own configuration. Correct the permissions of the file",
    "UNPROTECTED PRIVATE KEY": "others may read the private key, so ssh does not use it. Run chmod 600 on it",
}
"""What ssh says where another try would fail as well -> the remedy."""
