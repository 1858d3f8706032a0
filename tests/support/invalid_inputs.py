"""Invalid inputs that a person could give by mistake, with their error messages."""

import io
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

LAUNCH = ("launch", "CONFIG", "--on", "local:2x4")
TRAIN = ("train", "CONFIG")
Content = bytes | str | None
"""The content of a file; None = a directory."""


class Invalid(NamedTuple):
    """One invalid input, by default to a small run that works; `damage` changes a run with checkpoints 4 and 8."""

    messages: tuple[str, ...]
    words: tuple[str, ...] = LAUNCH
    config: bytes | str | None = None
    files: Mapping[str, Content] = {}
    variables: Mapping[str, str] = {}
    damage: Callable[[Path], object] | None = None


def train(
    overrides: tuple[str, ...], messages: tuple[str, ...], files: Mapping[str, Content] = {}, name: str = "CONFIG"
) -> Invalid:
    return Invalid(messages, ("train", name, *overrides), files=files)


def config(text: str | bytes, *messages: str) -> Invalid:
    return Invalid(messages, TRAIN, config=text)


def data(source: str, name: str, content: bytes | None, *messages: str, options: tuple[str, ...] = ()) -> Invalid:
    overrides = (f"data.source={source}", f"data.files=[{name}]", "data.length=4", *options)
    return train(overrides, messages, {name: content})


def on(given: str, *messages: str) -> Invalid:
    return Invalid(messages or ("is not valid; use local:PxD",), ("launch", "CONFIG", "--on", given))


def options(*given: str, message: str) -> Invalid:
    return Invalid((message,), (*LAUNCH, *given))


def hosts(content: str, *messages: str) -> Invalid:
    return Invalid(messages, ("launch", "CONFIG", "--on", "ssh:hosts.yaml", "--dry-run"), files={"hosts.yaml": content})


def kubernetes(*overrides: str, message: str) -> Invalid:
    right = ("launch.kubernetes.image=r.example.org/a:1", "launch.kubernetes.volume_claim=shared", "run.dir=run")
    return Invalid((message,), ("launch", "CONFIG", *right, *overrides, "--on", "kubernetes", "--dry-run"))


def slurm(*overrides: str, message: str) -> Invalid:
    return Invalid((message,), ("launch", "CONFIG", *overrides, "--on", "slurm", "--dry-run"))


def variables(*messages: str, **given: str) -> Invalid:
    return Invalid(messages, TRAIN, variables=given)


def job(*messages: str, **given: str) -> Invalid:
    """Environment variables of one of two processes; those that are not given are valid."""
    changed = {f"SPMDKIT_{name}": value for name, value in given.items()}
    return Invalid(messages, TRAIN, variables=JOB_OF_TWO | changed)


def damaged(damage: Callable[[Path], object], *messages: str, words: tuple[str, ...] = TRAIN) -> Invalid:
    return Invalid(messages, words, damage=damage)


def insert(path: Path, line: bytes) -> None:
    first, *others = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([first, line, *others, b""]))


def saved(save, *arrays: object, **named: object) -> bytes:
    file = io.BytesIO()
    save(file, *arrays, **named)
    return file.getvalue()


def lines(*records: object) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


ROWS = {"inputs": np.zeros((64, 4), np.float32), "targets": np.zeros(64, np.int32)}
NPZ = saved(np.savez, **ROWS)
NPY = saved(np.save, np.arange(100, dtype=np.uint16))
JOB_OF_TWO = {
    "SPMDKIT_JOB_ADDRESSES": "127.0.0.1:1",
    "SPMDKIT_NUM_PROCESSES": "2",
    "SPMDKIT_PROCESS_ID": "1",
    "SPMDKIT_SIMULATE": "4",
}
STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n1,n2"}

NUMBERS = {"no steps": train(("train.steps=0",), ("train.steps must be at least 1, got 0 (integer)",))}
STRATEGIES = {
    "sizes that do not multiply out": train(("strategy={fsdp: 3}",), ("run.simulate=8 gives 8 devices: 3 != 8",)),
    "a batch that cannot be split": train(("train.global_batch=12",), ("12 rows cannot be split evenly",)),
    "a misspelled strategy": train(("strategy={fdsp: 8}",), ("Did you mean strategy.fsdp?",)),
    "a width that the heads do not divide": train(
        ("model={name: transformer, width: 6, heads: 4}",), ("model.width=6",)
    ),
    "a missing module": train(("model={name: 'nowhere:model'}",), ("nowhere",)),
    "no classes": train(("model.classes=0",), ("model.classes is missing",)),
}
LAYOUTS = {
    "a dim that cannot be split": train(
        ("model.widths=[30]", "layouts={rules: {layers/0/kernel: [null, fsdp]}}"), ("layers/0/kernel",)
    ),
    "a rule for nothing": train(("layouts={rules: {layers/7/kernel: [fsdp, null]}}",), ("layers/7/kernel",)),
}
TEXTS = {
    "an empty file": config("", "the file is empty"),
    "a list for a file": config("- run\n- train\n", "the file must be a mapping of sections"),
    "a tab for indentation": config("run:\n\tseed: 1\n", "line 2", "'\\t'"),
    "a merge key": config("run: &r {seed: 1}\ntrain: {<<: *r}\n", "train.<< is not a valid key"),
}
DATA = {
    "half an archive": data("arrays", "d.npz", NPZ[: len(NPZ) // 2], "d.npz cannot be read as .npz"),
    "one array for an archive": data("arrays", "d.npz", NPY, "d.npz cannot be read as .npz"),
    "arrays of different lengths": data(
        "arrays", "d.npz", saved(np.savez, **{**ROWS, "targets": np.zeros(3)}), "d.npz: all arrays", "'targets': 3"
    ),
    "an archive for tokens": data("tokens", "d.npy", NPZ, "d.npy: it is an archive of arrays"),
    "null texts": data("jsonl", "d.jsonl", lines({"text": None}, {"text": None}), "every row is null or empty"),
    "ids with a point": data("jsonl", "d.jsonl", lines({"text": [1.0]}), "row 1", "write them without a decimal point"),
    "an empty text": data("text", "d.txt", b"", "data: the training split has 0 tokens"),
}
DAMAGED_DIRECTORIES = {
    "metrics with a foreign line": damaged(
        lambda run: insert(run / "metrics.jsonl", b"Segmentation fault"),
        "metrics.jsonl",
        "line 2",
        "Segmentation fault",
    ),
    "only empty checkpoints": damaged(
        lambda run: [
            (shutil.rmtree(run / "checkpoints" / step), (run / "checkpoints" / step).mkdir()) for step in "48"
        ],
        "No checkpoint in",
        "can be used",
    ),
    "half a config.yaml, launched": damaged(
        lambda run: (run / "config.yaml").write_text("run: {dir"), "config.yaml is not a valid config", words=LAUNCH
    ),
    "a broken link for the run": damaged(
        lambda run: (shutil.rmtree(run), run.symlink_to("nothing")), "is a broken symbolic link", words=LAUNCH
    ),
}
LAUNCHERS = {
    "an unknown launcher": on("", "unknown launcher"),
    "a misspelled launcher": on("loacl:2x4", "Did you mean local?"),
    "a launcher without sizes": on("local"),
    "processes without devices": on("local:2"),
    "no processes": on("local:0x4"),
    "more devices than a machine runs": on("local:1x100000", "at most 256 processes with 4096 simulated devices"),
}
OPTIONS = {
    "negative restarts": options("--restarts", "-1", message="--restarts"),
    "a missing config": Invalid(("nowhere.yaml",), ("launch", "nowhere.yaml", "--on", "local:2x4")),
}
HOSTS = {"half a hosts file": hosts("hosts: [gpu1, {name: g", "invalid YAML: line 1")}
KUBERNETES = {
    "no image": kubernetes("launch.kubernetes.image=''", message="image='' is not a valid container image"),
    "an image with capitals": kubernetes("launch.kubernetes.image=Team/Train", message="image='Team/Train'"),
    "no claim": kubernetes("launch.kubernetes.volume_claim=''", message="launch.kubernetes.volume_claim is missing"),
    "an unknown form": kubernetes("launch.kubernetes.form=pod", message="launch.kubernetes.form"),
    "half a core": kubernetes("launch.cpus_per_process=500m", message="launch.cpus_per_process must be an integer"),
}
SLURM = {"an account with a space": slurm("launch.slurm.account='a b'", message="launch.slurm.account")}
JOB = {"a rank beyond the last": job("SPMDKIT_PROCESS_ID", PROCESS_ID="2")}
VARIABLES = {
    "a rank of JAX alone": variables(
        "With JAX_PROCESS_ID=1, this process is one of several. Missing: the number", JAX_PROCESS_ID="1"
    ),
    "a task of Slurm without a count": variables("SLURM_PROCID", **STEP, SLURM_PROCID="1"),
    "a rank of MPI without a count": variables("OMPI_COMM_WORLD_RANK", OMPI_COMM_WORLD_RANK="1"),
}
TABLE = {
    f"{topic}: {name}": row
    for topic, rows in {
        "number": NUMBERS,
        "strategy": STRATEGIES,
        "layout": LAYOUTS,
        "text": TEXTS,
        "data": DATA,
        "resume": DAMAGED_DIRECTORIES,
        "launcher": LAUNCHERS,
        "option": OPTIONS,
        "ssh": HOSTS,
        "kubernetes": KUBERNETES,
        "slurm": SLURM,
        "job": JOB,
        "environment": VARIABLES,
    }.items()
    for name, row in rows.items()
}
