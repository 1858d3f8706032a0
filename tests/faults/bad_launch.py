"""The table of `test_bad_launch.py`: what may be wrong where a run is launched or goes on, and what is said of it."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

LAUNCH = ("launch", "CONFIG", "--on", "local:2x4")
TRAIN = ("train", "CONFIG")
BOMB = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


class Bad(NamedTuple):
    """One thing that is wrong.

    Attributes:
        says: Parts of the message.
        words: The command line; CONFIG stands for the file of a run.
        variables: Of the environment; where there are any, the command has a process of its own.
        damage: Done to the folder of a run that holds checkpoints of steps 4 and 8; None = there is no run yet.
        code: The exit code.
    """

    says: tuple[str, ...]
    words: tuple[str, ...] = LAUNCH
    variables: Mapping[str, str] = {}
    damage: Callable[[Path], object] | None = None
    code: int = 2


def on(given: str, *says: str) -> Bad:
    return Bad(says or ("is not a target; give local:PxD",), ("launch", "CONFIG", "--on", given))


def options(*given: str, says: str) -> Bad:
    return Bad((says,), (*LAUNCH, *given))


def variables(*says: str, **given: str) -> Bad:
    """What processes are told about each other; what is not given here is right."""
    known = {"JOB_ADDRESSES": "127.0.0.1:1", "NUM_PROCESSES": "2", "PROCESS_ID": "1", "SIMULATE": "4", **given}
    return Bad(says, TRAIN, {f"SPMDKIT_{name}": value for name, value in known.items()})


def damaged(damage: Callable[[Path], object], *says: str, words: tuple[str, ...] = TRAIN, code: int = 2) -> Bad:
    return Bad(says, words, damage=damage, code=code)


def cut(path: Path, part: float = 0.5) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * part)])


def write(path: Path, content: bytes | str) -> None:
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def folder_for(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def file_for(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.write_text("mine")


def pipe_for(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def without(path: Path, key: str) -> None:
    values = json.loads(path.read_text())
    del values[key]
    path.write_text(json.dumps(values))


def insert(path: Path, line: bytes) -> None:
    first, *others = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([first, line, *others, b""]))


FORMS = {
    "no place": on("", "is no place to launch on"),
    "a place that is nearly one": on("loacl:2x4", "Did you mean local?"),
    "a place in capitals": on("LOCAL:2x4", "is no place to launch on", "Did you mean local?"),
    "a place in colours": on("local\x1b[31m:2x4", "--on 'local\\x1b[31m:2x4' is no place"),
    "code for a place": on("os:system", "is no place to launch on"),
    "a place without sizes": on("local"),
    "a place without anything after its colon": on("local:"),
    "processes without devices": on("local:2"),
    "no processes": on("local:0x4"),
    "no devices": on("local:2x0"),
    "fewer than no processes": on("local:-1x4"),
    "half a process": on("local:1.5x4"),
    "three sizes": on("local:2x4x2"),
    "spaces between sizes": on("local:2 x 4"),
    "sizes of two lines": on("local:2x4\n"),
    "digits of another script": on("local:٢x٤"),
    "a size with a sign": on("local:+2x4"),
    "a size in hexadecimal": on("local:0x2x4"),
    "a star for a cross": on("local:2*4"),
    "more processes than a machine runs": on("local:100000x1", "at most 256 processes"),
    "more devices than a machine runs": on("local:1x100000", "at most 256 processes of 4096 simulated devices"),
    "a size of 5000 digits": on(f"local:{'9' * 5000}x1", "at most 256 processes"),
    "sizes that do not fit the mesh": on("local:2x3", "2 processes with 3 devices each give 6"),
}
"""What stands after `--on`."""

OPTIONS = {
    "restarts below none": options("--restarts", "-1", says="--restarts"),
    "restarts in words": options("--restarts", "often", says="--restarts"),
    "half a restart": options("--restarts", "1.5", says="--restarts"),
    "restarts without a number": options("--restarts", says="--restarts"),
    "no restarts in colours": options("--restarts", "\x1b[31m3", says="invalid int value: '\\x1b[31m3'"),
    "no place at all": Bad(("--on",), ("launch", "CONFIG")),
    "two places": options("--on", "local:3x3", says="3 processes with 3 devices each give 9"),
    "no config": Bad(("CONFIG",), ("launch", "--on", "local:2x4")),
    "a host that is no option": options("--hosts", "a,b", says="--hosts"),
    "another launcher's processes": options("--nproc-per-node=2", says="--nproc-per-node is not an option"),
    "a config that there is not": Bad(("nowhere.yaml",), ("launch", "nowhere.yaml", "--on", "local:2x4")),
    "a timeout below nothing": options("timeouts.rendezvous=-5", says="timeouts.rendezvous=-5 must be at least 1"),
    "no time to stop": options("timeouts.stop=0", says="timeouts.stop=0 must be at least 1 second"),
    "a step that takes less than nothing": options("timeouts.step=-1", says="timeouts.step=-1 must be at least 1"),
    "a timeout that is no number": options("timeouts.heartbeat=.nan", says="timeouts.heartbeat must be a whole number"),
    "a timeout in words": options("timeouts.shutdown=soon", says="timeouts.shutdown must be a whole number"),
    "no nodes": options("launch.nodes=0", says="launch.nodes must be at least 1"),
    "a shell command for a model": options(
        "model={name: 'os:system', command: 'touch ran'}", says="model.name='os:system' would import os"
    ),
    "a module that is not listed": options("optimizer={name: 'optax:sgd'}", says="run.allow"),
    "a list of what is no module": options("run.allow=['../code']", says="run.allow: '../code' is no name"),
    "an alias bomb": options(f"data={{{BOMB.replace(chr(10), ', ')}}}", says="more than 20,000 values"),
    "a folder of 5000 characters": options(f"run.dir={'r/' * 2500}", says="File name too long"),
    "a folder below a file": options("run.dir=CONFIG/run", says="of run.dir cannot be made: "),
    "a folder for a device": options("run.dir=/dev/null", says="of run.dir cannot be made: "),
    "a folder with a bell": options('run.dir="a\\ab"', says="run.dir must be text without control characters"),
}
"""Other words on the command line."""

VARIABLES = {
    "a count in words": variables("SPMDKIT_NUM_PROCESSES='two'", NUM_PROCESSES="two"),
    "a count of none": variables("SPMDKIT_NUM_PROCESSES='0'", NUM_PROCESSES="0"),
    "a count below none": variables("SPMDKIT_NUM_PROCESSES='-2'", NUM_PROCESSES="-2"),
    "half a count": variables("SPMDKIT_NUM_PROCESSES='2.5'", NUM_PROCESSES="2.5"),
    "a count in another script": variables("SPMDKIT_NUM_PROCESSES=", NUM_PROCESSES="٢"),
    "a count of 5000 digits": variables("SPMDKIT_NUM_PROCESSES=", NUM_PROCESSES="9" * 5000),
    "a count in colours": variables("SPMDKIT_NUM_PROCESSES='\\x1b[31m2'", NUM_PROCESSES="\x1b[31m2"),
    "a count without a rank": variables("SPMDKIT_PROCESS_ID", PROCESS_ID=""),
    "a count without an address": variables("SPMDKIT_JOB_ADDRESSES", JOB_ADDRESSES=""),
    "a rank in words": variables("SPMDKIT_PROCESS_ID='first'", PROCESS_ID="first"),
    "a rank below the first": variables("SPMDKIT_PROCESS_ID", PROCESS_ID="-1"),
    "a rank beyond the last": variables("SPMDKIT_PROCESS_ID", PROCESS_ID="2"),
    "an address without a port": variables("SPMDKIT_JOB_ADDRESSES='localhost'", JOB_ADDRESSES="localhost"),
    "an address with half a port": variables("SPMDKIT_JOB_ADDRESSES='localhost:'", JOB_ADDRESSES="localhost:"),
    "an address with garbage": variables("SPMDKIT_JOB_ADDRESSES='localhost:http'", JOB_ADDRESSES="localhost:http"),
    "a port beyond the last": variables("SPMDKIT_JOB_ADDRESSES=", "65536", JOB_ADDRESSES="localhost:65536"),
    "a port of none": variables("SPMDKIT_JOB_ADDRESSES='localhost:0'", JOB_ADDRESSES="localhost:0"),
    "a port without a host": variables("SPMDKIT_JOB_ADDRESSES=':1234'", JOB_ADDRESSES=":1234"),
    "IPv6 without brackets": variables("brackets", JOB_ADDRESSES="fd00::1:1234"),
    "IPv6 with half of them": variables("SPMDKIT_JOB_ADDRESSES='[fd00::1'", JOB_ADDRESSES="[fd00::1"),
    "an address with a space": variables("SPMDKIT_JOB_ADDRESSES='a b:1234'", JOB_ADDRESSES="a b:1234"),
    "an address of the web": variables("SPMDKIT_JOB_ADDRESSES=", JOB_ADDRESSES="http://a:1234"),
    "an address in colours": variables("\\x1b[31m", JOB_ADDRESSES="\x1b[31mhost:1234"),
    "more addresses than processes": variables("has 3 jobs, but num_processes is 2", JOB_ADDRESSES="a:1,b:2,c:3"),
    "addresses with nothing between": variables("SPMDKIT_JOB_ADDRESSES", JOB_ADDRESSES="a:1,"),
    "simulated devices in words": variables("SPMDKIT_SIMULATE='many'", SIMULATE="many"),
    "simulated devices below none": variables("SPMDKIT_SIMULATE='-4'", SIMULATE="-4"),
    "more simulated devices than there can be": variables(
        "2 processes with 1,000,000 devices each", SIMULATE="1000000"
    ),
    "a count of another library in words": Bad(
        ("KERAS_DISTRIBUTION_NUM_PROCESSES='x'",), TRAIN, {"KERAS_DISTRIBUTION_NUM_PROCESSES": "x"}
    ),
}
"""The environment of one of several processes."""

CONFIG, METRICS, PROVENANCE = "config.yaml", "metrics.jsonl", "provenance.json"

FOLDERS = {
    "half a config.yaml": damaged(lambda run: cut(run / CONFIG, 0.3), "config.yaml"),
    "a config.yaml of garbage": damaged(
        lambda run: write(run / CONFIG, b"\xff\x00\xfe" * 99), "config.yaml cannot be read as the config of a run"
    ),
    "a config.yaml of null bytes": damaged(
        lambda run: write(run / CONFIG, bytes(4096)), "config.yaml cannot be read as the config of a run"
    ),
    "an empty config.yaml": damaged(lambda run: write(run / CONFIG, b""), "config.yaml cannot be read as the config"),
    "an alias bomb for config.yaml": damaged(
        lambda run: write(run / CONFIG, BOMB), "config.yaml cannot be read", "more than 20,000 values"
    ),
    "a list for config.yaml": damaged(lambda run: write(run / CONFIG, "- a\n- b\n"), "it holds no mapping of sections"),
    "a config.yaml of another run": damaged(
        lambda run: write(run / CONFIG, (run / CONFIG).read_text().replace("seed: 0", "seed: 7")),
        "differs from the run in",
        "run.seed: 7 there, 0 here",
    ),
    "no config.yaml beside checkpoints": damaged(
        lambda run: (run / CONFIG).unlink(), "config.yaml does not say data.", "and more: there is none"
    ),
    "a folder for config.yaml": damaged(lambda run: folder_for(run / CONFIG), "config.yaml is a folder"),
    "a pipe for config.yaml": damaged(lambda run: pipe_for(run / CONFIG), "config.yaml is a device or pipe"),
    "metrics of garbage": damaged(lambda run: write(run / METRICS, b"\xff\x00\n" * 99), "metrics.jsonl"),
    "metrics with a foreign line": damaged(
        lambda run: insert(run / METRICS, b"Segmentation fault"), "metrics.jsonl", "line 2", "Segmentation fault"
    ),
    "metrics in colours": damaged(
        lambda run: insert(run / METRICS, b"\x1b[31mred"), "metrics.jsonl", "line 2", "\\x1b[31mred"
    ),
    "metrics of another program": damaged(
        lambda run: write(run / METRICS, b'{"epoch": 1}\n{"epoch": 2}\n'), "metrics.jsonl is no log of a run"
    ),
    "a table for metrics": damaged(lambda run: write(run / METRICS, "step,loss\n1,2.0\n"), "metrics.jsonl"),
    "a folder for metrics.jsonl": damaged(lambda run: folder_for(run / METRICS), "metrics.jsonl is a folder"),
    "half a provenance.json": damaged(lambda run: cut(run / PROVENANCE), "provenance.json is damaged"),
    "a provenance.json of garbage": damaged(
        lambda run: write(run / PROVENANCE, b"\xff\x00" * 99), "provenance.json is damaged"
    ),
    "an empty provenance.json": damaged(lambda run: write(run / PROVENANCE, b""), "provenance.json is damaged"),
    "a list for provenance.json": damaged(lambda run: write(run / PROVENANCE, "[1, 2]"), "provenance.json is damaged"),
    "a provenance.json without its model": damaged(
        lambda run: without(run / PROVENANCE, "model"), "provenance.json is damaged"
    ),
    "a JSON bomb for provenance.json": damaged(
        lambda run: write(run / PROVENANCE, "[" * 100_000), "provenance.json is damaged"
    ),
    "a folder for provenance.json": damaged(lambda run: folder_for(run / PROVENANCE), "provenance.json is a folder"),
    "a folder for goodput.jsonl": damaged(lambda run: folder_for(run / "goodput.jsonl"), "goodput.jsonl is a folder"),
    "a folder for guards.json": damaged(lambda run: folder_for(run / "guards.json"), "guards.json is a folder"),
    "metrics of null bytes": damaged(lambda run: insert(run / METRICS, bytes(64)), "metrics.jsonl", "line 2"),
    "metrics whose step is a word": damaged(
        lambda run: insert(run / METRICS, b'{"step": "four", "loss": 1.0}'), "metrics.jsonl is no log of a run"
    ),
    "a folder for owner.json": damaged(lambda run: folder_for(run / "owner.json"), "owner.json is a folder"),
    "a link to nothing for owner.json": damaged(
        lambda run: (run / "owner.json").symlink_to("nothing"), "owner.json cannot be used"
    ),
    "a file for checkpoints": damaged(lambda run: file_for(run / "checkpoints"), "checkpoints is a file"),
    "a link to nothing for checkpoints": damaged(
        lambda run: (shutil.rmtree(run / "checkpoints"), (run / "checkpoints").symlink_to("nothing")),
        "checkpoints cannot be used",
    ),
    "checkpoints that all are empty": damaged(
        lambda run: [
            (shutil.rmtree(run / "checkpoints" / step), (run / "checkpoints" / step).mkdir()) for step in "48"
        ],
        "No checkpoint in",
        "can be used",
    ),
    "a file for logs": damaged(lambda run: file_for(run / "logs"), "logs is a file", words=LAUNCH),
    "half a config.yaml, launched": damaged(lambda run: cut(run / CONFIG, 0.3), "config.yaml", words=LAUNCH),
    "a link to itself for the run": damaged(
        lambda run: (shutil.rmtree(run), run.symlink_to(run.name)), "of run.dir cannot be made: ", words=LAUNCH
    ),
    "a link to nothing for the run": damaged(
        lambda run: (shutil.rmtree(run), run.symlink_to("nothing")), "it is a link to nothing", words=LAUNCH
    ),
}
"""What may have happened to the folder of a run."""

TABLE = {**FORMS, **OPTIONS, **VARIABLES, **FOLDERS}
