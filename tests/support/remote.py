"""Hosts of a run: private SSH servers on loopback addresses, and agents that start without ssh."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from spmdkit.launch.remote.client import FRAME, message
from spmdkit.launch.remote.preflight import BOOTSTRAP
from spmdkit.launch.startup.addresses import Address, wait_until_listening
from spmdkit.launch.supervision.workers import free_port
from support.processes import stat_fields, wait_for

SSHD = "/usr/sbin/sshd"
CONFIG = """
Port {port}
ListenAddress {address}
HostKey {folder}/host_key
PidFile {folder}/sshd.pid
AuthorizedKeysFile {keys}/user_key.pub
UsePAM no
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
"""
CLIENT = """
IdentityFile {folder}/user_key
IdentitiesOnly yes
UserKnownHostsFile {folder}/known_hosts
GlobalKnownHostsFile /dev/null
StrictHostKeyChecking yes
"""


class Keys:
    """A user's key, and the configuration of ssh that uses it and nothing of this machine's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_key(folder / "user_key")
        self.config = folder / "ssh_config"
        self.config.write_text(CLIENT.format(folder=folder))

    @property
    def words(self) -> list[str]:
        """For `ssh` in a hosts file."""
        return ["-F", str(self.config)]

    def know(self, server: "Server") -> None:
        kind, key, *_ = (server.folder / "host_key.pub").read_text().split()
        with (self.folder / "known_hosts").open("a") as file:
            file.write(f"[{server.address}]:{server.port} {kind} {key}\n")


class Server:
    """One host: an SSH server, and what runs under it."""

    def __init__(self, folder: Path, keys: Keys, address: str) -> None:
        folder.mkdir()
        self.folder, self.address, self.port = folder, address, free_port()
        make_key(folder / "host_key")
        config = folder / "sshd_config"
        config.write_text(CONFIG.format(port=self.port, address=address, folder=folder, keys=keys.folder))
        if os.geteuid() == 0:
            os.makedirs("/run/sshd", exist_ok=True)  # where its unprivileged part lives; nothing is written there
        self.start()
        keys.know(self)

    def start(self) -> None:
        words = [SSHD, "-D", "-E", str(self.folder / "log"), "-f", str(self.folder / "sshd_config")]
        self.process = subprocess.Popen(words, stdin=subprocess.DEVNULL)
        wait_until_listening(Address(self.address, self.port))

    @property
    def entry(self) -> dict:
        """In a hosts file."""
        return {"name": self.address, "port": self.port}

    def processes(self) -> dict[int, str]:
        """Everything that runs under the server -> its command line."""
        return {pid: command_line(pid) for pid in descendants(self.process.pid)}

    def pid_of(self, words: str) -> int:
        """The one process under the server whose command line holds some words."""
        (pid,) = (pid for pid, line in self.processes().items() if words in line)
        return pid

    def die(self) -> None:
        """The server and its sessions end at once; what ran under them is left to itself."""
        sessions = [pid for pid, line in self.processes().items() if line.startswith("sshd")]
        for pid in [self.process.pid, *sessions]:
            os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def make_key(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)


def descendants(pid: int) -> list[int]:
    """The children of a process, theirs, and so on."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := stat_fields(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, new = [], children.get(pid, [])
    while new:
        found += new
        new = [child for parent in new for child in children.get(parent, [])]
    return found


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


SSH = [sys.executable, "-c", BOOTSTRAP]
"""In place of ssh with its options and the command that it runs there."""
TOKEN = "0123456789abcdef"


def job(program: str, **more) -> dict:
    """A job that runs a small Python program."""
    return {
        "do": "run",
        "token": TOKEN,
        "command": [sys.executable, "-u", "-c", program],
        "directory": "/",
        "environment": {},
        "silence": 60.0,
        "delay": 0.0,
        **more,
    }


def begin(given: dict) -> subprocess.Popen[bytes]:
    """Starts an agent and reads its first line."""
    process = subprocess.Popen(SSH, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(message(given))
    assert process.stdout.readline() == f"spmdkit agent {TOKEN}\n".encode()
    return process


def frames(process: subprocess.Popen[bytes]) -> dict[bytes, bytes]:
    """All that an agent sends until its end, by kind."""
    found: dict[bytes, bytes] = {}
    assert process.stdout is not None
    while header := process.stdout.read(FRAME.size):
        kind, size = FRAME.unpack(header)
        text = b""
        while len(text) < size:
            text += process.stdout.read(size - len(text))
        found[kind] = found.get(kind, b"") + text
    return found


def answer(process: subprocess.Popen[bytes]) -> dict:
    """What an agent that was asked tells of its host."""
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def wait_for_text(path: Path) -> str:
    """What a file holds as soon as it holds anything."""
    wait_for(lambda: path.exists() and path.read_text(), 30)
    return path.read_text()
