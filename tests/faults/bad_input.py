"""The table of `test_bad_input.py`: what somebody may give by mistake, or to break things, and what is said of it."""

import io
import json
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np


class Bad(NamedTuple):
    """One input.

    Attributes:
        overrides: Arguments after CONFIG.
        says: Parts of the message; the first is the key or the file.
        config: The text of the YAML file; None = a tiny run that works.
        files: Name -> content of further files, in the working directory; None = a folder of that name.
        name: Of the YAML file, as it is given on the command line; None = that of the tiny run.
        code: The exit code.
    """

    overrides: tuple[str, ...]
    says: tuple[str, ...]
    config: str | bytes | None = None
    files: Mapping[str, bytes | None] = {}
    name: str | None = None
    code: int = 2


def number(key: str, value: str, says: str) -> Bad:
    return Bad((f"{key}={value}",), (f"{key} {says}",))


def config(text: str | bytes, *says: str) -> Bad:
    return Bad((), says, config=text)


def data(source: str, name: str, content: bytes | None, *says: str, options: tuple[str, ...] = ()) -> Bad:
    return Bad(
        (f"data.source={source}", f"data.files=[{name}]", "data.length=4", *options), says, files={name: content}
    )


def saved(save, *arrays: object, **named: object) -> bytes:
    file = io.BytesIO()
    save(file, *arrays, **named)
    return file.getvalue()


def lines(*records: object) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


ROWS = {"inputs": np.zeros((64, 4), np.float32), "targets": np.zeros(64, np.int32)}
NPZ = saved(np.savez, **ROWS)
NPY = saved(np.save, np.arange(100, dtype=np.uint16))
BOMB = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
UP_TO_INT32, UP_TO_FLOAT32 = "must be at most 2147483647", "must be a number of float32, at most 3.4e+38"
FINITE = "must be a number, and finite"

NUMBERS = {
    "steps beyond floats' whole numbers": number("train.steps", "1e30", UP_TO_INT32),
    "a trillion steps": number("train.steps", "1000000000000", UP_TO_INT32),
    "no steps": number("train.steps", "0", "must be at least 1"),
    "half a step": number("train.steps", "1.5", "must be a whole number"),
    "steps that are no number": number("train.steps", ".nan", "must be a whole number"),
    "endless steps": number("train.steps", ".inf", "must be a whole number"),
    "steps in words": number("train.steps", "ten", "must be a whole number"),
    "steps of a list": number("train.steps", "[1, 2]", "must be a whole number"),
    "steps that are true": number("train.steps", "true", "must be a whole number"),
    "a batch of a billion": Bad(("train.global_batch=1000000000",), ("train.global_batch=1000000000", "7772")),
    "a batch beyond 32 bits": number("train.global_batch", "8589934592", UP_TO_INT32),
    "a prime batch": Bad(("train.global_batch=2147483647",), ("2147483647 rows cannot be split evenly",)),
    "microbatches beyond the batch": Bad(("train.accumulate=2147483647",), ("train.accumulate 2147483647",)),
    "a seed of 2**63": Bad(
        ("run.seed=9223372036854775808",), ("run.seed=9223372036854775808 has to be from 0 to 2**32 - 1",)
    ),
    "a seed of 2**70": Bad(
        ("run.seed=1180591620717411303424",), ("run.seed=1180591620717411303424 has to be from 0 to 2**32 - 1",)
    ),
    "a seed of 2**32, which JAX takes for 0": Bad(
        ("run.seed=4294967296",), ("run.seed=4294967296 has to be from 0 to 2**32 - 1",)
    ),
    "a seed below 0": number("run.seed", "-1", "must be at least 0"),
    "a seed of 5000 digits": Bad((f"run.seed={'9' * 5000}",), ("the value: ", "cannot be read as int")),
    "a seed of 5000 hexadecimal digits": Bad((f"run.seed=0x{'f' * 5000}",), ("20,000 bits is too large",)),
    "a million devices": number("run.simulate", "1000000", "must be at most 4096"),
    "a mesh of a billion": Bad(("strategy.data=1000000000",), ("strategy.data.size must be at most 1048576",)),
    "a clip that is no number": number("train.clip_norm", ".nan", FINITE),
    "an endless clip": number("train.clip_norm", ".inf", FINITE),
    "a rate that is no number": number("optimizer.learning_rate", ".NaN", FINITE),
    "a rate below all numbers": number("optimizer.learning_rate", "-.inf", FINITE),
    "a rate beyond float64": number("optimizer.learning_rate", "1e400", FINITE),
    "a rate beyond float32": number("optimizer.learning_rate", "1e39", UP_TO_FLOAT32),
    "a rate that float32 rounds to 0": number("optimizer.learning_rate", "1e-320", "must be 0 or a number of float32"),
    "steps of YAML 1.1": number("train.steps", "1_000", "must be a whole number, not '1_000' (text)"),
    "a rate of 400 digits": number("optimizer.learning_rate", "9" * 300, UP_TO_FLOAT32),
    "a rate of minus nothing": Bad(
        ("optimizer.learning_rate=-0.0",), ("optimizer.learning_rate=0.0 has to be over 0",)
    ),
    "decay rates that are no numbers": number("optimizer.betas", "[.nan, 0.9]", FINITE),
    "a ratio that is no number": Bad(
        ("optimizer.schedule={name: cosine, final_ratio: .nan}",), ("optimizer.schedule.final_ratio=nan",)
    ),
    "a share that is no number": number("data.eval_fraction", ".nan", FINITE),
    "a temperature that is no number": number("sample.temperature", ".nan", FINITE),
    "a sample without end": number("sample.length", "2000000000", "must be at most 1000000"),
    "a billion batches ahead": number("data.prefetch", "1000000000", "must be at most 1024"),
    "a billion threads": number("data.threads", "1000000000", "must be at most 1024"),
    "a timeout of a century": number("timeouts.heartbeat", "3000000000", "must be at most 604800"),
    "a floor beyond 64 bits": Bad(
        ("strategy.fsdp.floor_bytes=99999999999999999999GiB",), ("strategy.fsdp.floor_bytes must be at most",)
    ),
    "a layer of a billion": number("model.widths", "[1000000000]", "must be at most 16777216"),
    "layers of 1e30": number("model.widths", "[1e30]", "must be at most 16777216"),
    "layers beyond 1e15 parameters": Bad(
        ("model.widths=[16777216, 16777216, 16777216, 16777216, 16777216]",), ("model.widths=", "1e+15 are the most")
    ),
    "layers that no machine holds": Bad(("model.widths=[16000000, 1000000]",), ("does not fit", "model.width")),
    "a width of a billion": Bad(
        ("model={name: transformer, width: 1000000000}", "data.source=stdlib"),
        ("model.width must be at most 16777216",),
    ),
    "a width of 1e30": Bad(("model={name: transformer, width: 1e30}",), ("model.width must be at most 16777216",)),
    "widths that multiply to too much": Bad(
        ("model={name: transformer, width: 16777216, layers: 65536}",), ("model.width=16777216 makes",)
    ),
    "heads beyond counting": Bad(
        ("model={name: transformer, heads: 2000000000, kv_heads: 3}",), ("model.heads must be at most 65536",)
    ),
}

TEXTS = {
    "an alias bomb": config(BOMB, "not usable YAML: it holds more than 20,000 values"),
    "an alias that holds itself": config("train: &t {steps: *t}\n", "nest too deeply, or one holds itself"),
    "a list that holds itself": config("data: {files: &f [*f]}\n", "nest too deeply, or one holds itself"),
    "lists in lists": config("data: " + "[" * 3000 + "]" * 3000, "nest too deeply"),
    "sixty mappings in each other": config("{a: " * 60 + "1" + "}" * 60, "nest too deeply"),
    "an alias of nothing": config("train: *nothing\n", "not valid YAML: line 1", "undefined alias"),
    "more than a megabyte": config("# " + "x" * 2**20, "the file has more than 1,048,576 bytes"),
    "a tag that runs a program": config(
        "a: !!python/object/apply:os.system [ls]\n", "line 1: the tag 'python/object/apply:os.system'"
    ),
    "a tag that its text is not": config(
        "train: {steps: !!int ten}\n", "line 1: train.steps: 'ten' cannot be read as int"
    ),
    "a date that is none": config("run: {dir: !!timestamp soon}\n", "run.dir: 'soon' cannot be read as timestamp"),
    "a truth value that is none": config(
        "data: {shuffle: !!bool perhaps}\n", "data.shuffle: 'perhaps' cannot be read as bool"
    ),
    "a document that is null": config("null\n", "the file must be a mapping of sections, not null"),
    "an empty file": config("", "the file is empty"),
    "a file of blank lines": config("\n  \n\n", "the file is empty"),
    "half a file": config("run: {simulate: 8, di", "not valid YAML: line 1"),
    "a list for a file": config("- run\n- train\n", "the file must be a mapping of sections"),
    "a word for a file": config("quickstart\n", "the file must be a mapping of sections"),
    "two documents": config("run: {seed: 1}\n---\nrun: {seed: 2}\n", "another document"),
    "a tab for indentation": config("run:\n\tseed: 1\n", "line 2", "'\\t'"),
    "bytes that are no text": config(b"\x7fELF\x02\x01\x01\x00\x00\x00", "special characters are not allowed"),
    "Latin-1": config("# für\nrun: {seed: 1}\n".encode("latin-1"), "line 1: the byte 0xfc is not UTF-8"),
    "UTF-16": config("run: {seed: 1}\n".encode("utf-16"), "line 1: the byte 0xff is not UTF-8"),
    "a key that is a list": config("? [a, b]\n: 1\n", "line 1: a key must be text"),
    "a key without a name": config("run: {'': 1}\n", "line 1: a key is empty"),
    "a key in colours": config('"\\e[31mrun\\e[0m": 1\n', "line 1: the key '\\x1b[31mrun\\x1b[0m'"),
    "a key of two lines": config('"run\\nseed": 1\n', "line 1: the key 'run\\nseed'"),
    "a key that turns the line around": config('"run\u202eseed": 1\n', "line 1: the key 'run\\u202eseed'"),
    "a key without end": config(f"{'k' * 900}: 1\n", "a key of 900 characters"),
    "a key with dots": config("train.steps: 3\n", "train.steps is not a section", "Write train: {steps: ...}"),
    "a merge key": config("run: &r {seed: 1}\ntrain: {<<: *r}\n", "train.<< is not a key"),
    "half a character": config('run: {dir: "\\ud800"}\n', "run.dir: '\\ud800' holds half a character"),
    "a folder with a bell": config('run: {dir: "a\\ab"}\n', "run.dir must be text without control characters"),
    "a folder with a null byte": config('run: {dir: "a\\0b"}\n', "run.dir must be text without control characters"),
    "a section of null rules": config("layouts: {rules: 3}\n", "layouts.rules must be a mapping"),
}

ARGUMENTS = {
    "an override without a value": Bad(("train.steps",), ("  train.steps: it must be key=value",)),
    "an override without a key": Bad(("=3",), ("  =3: it must be key=value",)),
    "an override of dots": Bad(("...=3",), ("  ...=3: it must be key=value",)),
    "an override with a newline in its key": Bad(("train.\nsteps=3",), ("  'train.\\nsteps=3': it must be key=value",)),
    "an override in colours": Bad(("train.\x1b[31msteps=3",), ("  'train.\\x1b[31msteps=3': it must be key=value",)),
    "an override whose value is in colours": Bad(("run.dir=\x1b[31m",), ("special characters are not allowed",)),
    "an override in another script": Bad(("train.шаги=3",), ("train.шаги is not a key",)),
    "an override of half a mapping": Bad(("train={steps: 1",), ("not valid YAML",)),
    "an override below a number": Bad(
        ("train.steps.x=1", "train.steps=3"), ("train.steps is 3 and has no keys below it",)
    ),
    "an alias bomb for an override": Bad((f"data={{x: [{BOMB[4:29]}]}}",), ("on the command line",)),
    "a name from another library": Bad(
        ("strategy={dp: 8}",), ("strategy.dp is not a key. Did you mean strategy.data?",)
    ),
    "another library's rate": Bad(("train.lr=1",), ("train.lr is not a key. Did you mean optimizer.learning_rate?",)),
    "another library's batch": Bad(
        ("batch_size=8",), ("batch_size is not a section. Did you mean train.global_batch?",)
    ),
    "a folder for a config": Bad((), ("this is a folder",), files={"configs": None}, name="configs"),
    "the null device for a config": Bad((), ("/dev/null", "this is no regular file"), name="/dev/null"),
    "a config without a name": Bad((), ("1 problem in an empty name:",), name=""),
    "a config in colours": Bad((), ("\\x1b[31m", "there is no such file"), name="\x1b[31mred.yaml"),
    "a config with a null byte": Bad((), ("there is no such file",), name="a\0b"),
    "a config of 300 characters": Bad((), ("File name too long",), name="c" * 300),
    "a config below a file": Bad((), ("Not a directory",), files={"a": b""}, name="a/b.yaml"),
    "a preset that is nearly one": Bad((), ("Did you mean quickstart?",), name="quickstrat"),
}

DATA = {
    "garbage for arrays": data("arrays", "d.npz", b"garbage" * 100, "d.npz cannot be read as .npz", "np.savez"),
    "nothing for arrays": data("arrays", "d.npz", b"", "d.npz cannot be read as .npz"),
    "half an archive": data("arrays", "d.npz", NPZ[: len(NPZ) // 2], "d.npz cannot be read as .npz"),
    "a flipped byte in an archive": data(
        "arrays", "d.npz", NPZ[:300] + bytes([NPZ[300] ^ 255]) + NPZ[301:], "d.npz cannot be read as .npz", "CRC"
    ),
    "one array for an archive": data("arrays", "d.npz", NPY, "d.npz cannot be read as .npz"),
    "an archive of nothing": data("arrays", "d.npz", saved(np.savez), "d.npz: it holds no arrays"),
    "pickled objects": data(
        "arrays",
        "d.npz",
        saved(np.savez, inputs=np.array([{}, set()], object), targets=np.zeros(2)),
        "d.npz cannot be read as .npz",
        "Object arrays cannot be loaded",
    ),
    "arrays of words": data(
        "arrays", "d.npz", saved(np.savez, inputs=np.array(["a", "b"])), "d.npz: 'inputs' holds <U1"
    ),
    "arrays of different lengths": data(
        "arrays", "d.npz", saved(np.savez, **{**ROWS, "targets": np.zeros(3)}), "d.npz: its arrays have", "'targets': 3"
    ),
    "an array without rows": data("arrays", "d.npz", saved(np.savez, inputs=np.float32(1)), "d.npz: its arrays have"),
    "floats for tokens": data(
        "tokens", "d.npy", saved(np.save, np.zeros(100)), "d.npy: it holds float64", "astype(np.uint32)"
    ),
    "a table for tokens": data(
        "tokens", "d.npy", saved(np.save, np.zeros((9, 9), int)), "d.npy: it holds int64 of shape (9, 9)", "reshape(-1)"
    ),
    "garbage for tokens": data("tokens", "d.npy", b"\x93NUMPY garbage", "d.npy: it cannot be read as .npy"),
    "an archive for tokens": data("tokens", "d.npy", NPZ, "d.npy: it is an archive of arrays"),
    "pickled tokens": data(
        "tokens", "d.npy", saved(np.save, np.array([{}], object)), "d.npy: it cannot be read as .npy"
    ),
    "three bytes for tokens of two": data(
        "tokens", "d.bin", b"abc", "3 bytes are no whole number of uint16", options=("data.dtype=uint16",)
    ),
    "null texts": data(
        "jsonl", "d.jsonl", lines({"text": None}, {"text": None}), "data.column='text' is null in 2", "Set data.column"
    ),
    "empty texts": data("jsonl", "d.jsonl", lines({"text": ""}), "data.column='text' is null in 0 and empty in 1"),
    "no lines": data("jsonl", "d.jsonl", b"\n\n", "the 1 file holds no rows"),
    "a column that there is not": data(
        "jsonl", "d.jsonl", lines({"txt": "a"}), "there is no column 'text'", "data.column: txt"
    ),
    "lines that are no JSON": data("jsonl", "d.jsonl", b"{text\n", "d.jsonl, line 1: it cannot be read as JSON"),
    "lines that are no text": data("jsonl", "d.jsonl", b"\xff\xfe{}\n", "d.jsonl, line 1: it cannot be read as JSON"),
    "a JSON bomb": data("jsonl", "d.jsonl", b"[" * 100_000 + b"\n", "d.jsonl, line 1: it cannot be read as JSON"),
    "a text with half a character": data(
        "jsonl", "d.jsonl", b'{"text": "\\ud800"}\n', "d.jsonl, row 1: the text holds half a character"
    ),
    "ids with a point": data(
        "jsonl", "d.jsonl", lines({"text": [1.0, 2.0]}), "d.jsonl, row 1", "write them without a decimal point"
    ),
    "ids beyond 32 bits": data("jsonl", "d.jsonl", lines({"text": [2**40]}), "d.jsonl, row 1"),
    "numbers for texts": data("jsonl", "d.jsonl", lines({"text": 5}), "d.jsonl, row 1"),
    "an empty text": data("text", "d.txt", b"", "data: the training split holds 0 tokens"),
    "a folder for a text": data("text", "d.txt", None, "d.txt' matches no file. It is a folder"),
    "a file with the wrong ending": data("arrays", "d.txt", NPZ, "'.txt'; this source reads .npz"),
    "a pattern for nothing": Bad(
        ("data.source=text", "data.files=['*.csv']"), ("matches no file", "Paths in a YAML file start from its folder")
    ),
    "a module that imports what is not there": Bad(
        ("data.source=mine:make",),
        ("mine.py, line 1 (import no_such_package)", "No module named 'no_such_package'"),
        files={"mine.py": b"import no_such_package\n"},
    ),
}

FOLDERS = {
    "a run folder of 300 characters": Bad(
        (f"run.dir={'r' * 300}",), ("of run.dir cannot be made: File name too long",)
    ),
    "a run folder below a file": Bad(("run.dir=a/run",), ("of run.dir cannot be made: ",), files={"a": b""}),
    "a run folder that is a file": Bad(("run.dir=a",), ("of run.dir cannot be made: ",), files={"a": b""}),
    "a folder for config.yaml": Bad(("run.dir=r",), ("r/config.yaml",), files={"r/config.yaml": None}),
    "a folder for metrics.jsonl": Bad(("run.dir=r",), ("r/metrics.jsonl",), files={"r/metrics.jsonl": None}),
    "a file for checkpoints": Bad(("run.dir=r",), ("r/checkpoints",), files={"r/checkpoints": b""}),
    "a cut config.yaml beside checkpoints": Bad(
        ("run.dir=r",), ("r/config.yaml",), files={"r/config.yaml": b"run: {dir", "r/checkpoints/4": None}
    ),
    "a binary config.yaml beside checkpoints": Bad(
        ("run.dir=r",), ("r/config.yaml",), files={"r/config.yaml": b"\xff\x00\xfe", "r/checkpoints/4": None}
    ),
}
"""What run.dir may already hold, or cannot be."""

TABLE = {**NUMBERS, **TEXTS, **ARGUMENTS, **DATA, **FOLDERS}
