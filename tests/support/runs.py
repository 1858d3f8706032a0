"""Small runs: their configs, the command line as a user types it, their files, and comparisons of two runs."""

import importlib.util
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent, indent
from types import ModuleType
from typing import Any

import numpy as np
import yaml
from spmdkit.checkpoints.identity import RUN, Identity
from spmdkit.checkpoints.manager import Checkpoints
from spmdkit.configs import load_config
from spmdkit.configs.config_text import resolved_yaml
from spmdkit.launch.cli import main
from spmdkit.layouts.paths import leaves_with_paths, map_with_path
from spmdkit.parallel.sharding.stored_order import stored_order
from spmdkit.runtime.build_run import build
from spmdkit.runtime.provenance import describe_run
from support.faults import latest_checkpoint

TESTS = Path(__file__).resolve().parents[1]
CACHE = TESTS.parent / ".cache" / "jax"
QUICK = {
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "JAX_COMPILATION_CACHE_DIR": str(CACHE),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
}
"""Environment of processes whose programs compile for longer than they run; they compile as this process does."""

TINY = {
    "run": {"simulate": 8, "log_every": 1},
    "model": {"name": "mlp", "classes": 10, "widths": [32]},
    "data": {"source": "synthetic"},
    "strategy": {"fsdp": {"size": 4, "floor_bytes": 256}, "data": 2},
    "optimizer": {"learning_rate": 0.01, "schedule": {"name": "cosine"}},
    "train": {"steps": 12, "global_batch": 16},
    "eval": {"every": 4, "batches": 2},
    "checkpoint": {"every": 4},
    "sample": {"length": 0},
}
"""A classifier that trains in a second."""

LANGUAGE = {
    "model": {"name": "transformer", "layers": 2, "width": 16, "heads": 2, "mlp_width": 32, "dropout": 0.1},
    "data": {"source": "text", "length": 16, "eval_fraction": 0.3},
}
"""What makes it a language model instead; give `files` too."""


def write_config(folder: Path, **sections: Any) -> Path:
    """Writes TINY, with whole sections replaced, as config of a run in `folder`/run; returns the file."""
    folder.mkdir(exist_ok=True)
    tree = {**TINY, **sections}
    tree["run"] = {"dir": str(folder / "run"), **tree["run"]}
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


def write_language_config(folder: Path, **sections: Any) -> Path:
    """Writes a few small text files and the config of a language model that reads them."""
    corpus = folder / "corpus"
    corpus.mkdir(parents=True)
    words = random.Random(0)
    for number in range(8):
        text = " ".join(words.choice(["mesh", "axis", "layout", "step", "of", "the"]) for _ in range(200))
        (corpus / f"{number}.txt").write_text(text, encoding="utf-8")
    data = {**LANGUAGE["data"], "files": [str(corpus / "*.txt")]}
    return write_config(folder, **{**LANGUAGE, "data": data, **sections})


def write_staged_config(folder: Path, **sections: Any) -> Path:
    """The same for a model on stages, which store its blocks in another order."""
    model = {"name": "transformer", "layers": 4, "width": 16, "heads": 2, "mlp_width": 32}
    pipe = {"size": 2, "schedule": "interleaved_1f1b", "virtual": 2, "microbatches": 4}
    return write_language_config(folder, model=model, strategy={"pipe": pipe, "data": 4}, **sections)


def rows_of_files(pause: float = 0.0) -> str:
    """The text of a module whose `make(config)` gives the rows of inputs.npy and targets.npy beside it."""
    return f"""
import time
import numpy as np
from pathlib import Path
from spmdkit.data import Splits

class Rows:
    def __init__(self, folder):
        self.inputs, self.targets = (np.load(folder / f"{{name}}.npy") for name in ("inputs", "targets"))

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        time.sleep({pause})
        return {{"inputs": self.inputs[index], "targets": self.targets[index], "weights": np.float32(1)}}

def make(config):
    source = Rows(Path(__file__).parent)
    return Splits(source, [source[index] for index in range(len(source) - 64, len(source))], None, "rows of a file")
"""


def source_module(before: str, take: str, opening: str = "") -> str:
    """The text of a module whose `rows(config)` are the synthetic digits; `take` runs before rows are taken."""
    take, opening = indent(dedent(take), " " * 8), indent(dedent(opening), " " * 4)
    return f"""{dedent(before)}
from spmdkit.data import open_splits
from spmdkit.data.config import DataConfig

class Source:
    def __init__(self, source):
        self.source, self.taken = source, 0
    def __len__(self):
        return len(self.source)
    def __getitem__(self, index):
        return self.source[index]
    def take(self, indices):
        self.taken += 1
{take}
        return self.source.take(indices)

def rows(config):
{opening}
    found = open_splits(DataConfig(source="synthetic"))
    return found._replace(train=Source(found.train))
"""


def command(*arguments: str | Path) -> list[str]:
    """The command line of spmdkit in a new process."""
    return [sys.executable, "-m", "spmdkit", *map(str, arguments)]


def environment(**variables: str) -> dict[str, str]:
    """The environment of a new process: nothing of JAX's but what is given, and QUICK."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "SPMDKIT_"))}
    return clean | QUICK | variables


def spmdkit(*arguments: str | Path, timeout: float = 240, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs spmdkit in a new process."""
    return subprocess.run(
        command(*arguments), env=environment(**variables), capture_output=True, text=True, timeout=timeout
    )


def at_moment(*words: str | Path) -> list[str]:
    """The command line of at_moment.py; needs PYTHONPATH=TESTS."""
    return [sys.executable, "-m", "support.at_moment", *map(str, words)]


def run_at_moment(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs at_moment.py in a new process."""
    env = environment(PYTHONPATH=str(TESTS))
    return subprocess.run(at_moment(*words), env=env, capture_output=True, text=True, timeout=240)


def trained(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs spmdkit in a new process, which has to end well."""
    ended = spmdkit(*arguments, **variables)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended


def train(config: Path, *overrides: str, code: int = 0) -> None:
    """Trains in this process, which has to end with this code."""
    assert main(["train", str(config), *overrides]) == code


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run, without its identity and what the clock says."""
    timed = ("run", "seconds", "tokens_per_second", "rows_per_second", "flops_per_second")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in record.items() if name not in timed} for record in records]


def losses(folder: Path) -> dict[int, float]:
    """Step -> its loss, in the order written."""
    return {record["step"]: record["loss"] for record in metrics(folder)}


def state_arrays(config: Path, step: int, folder: Path | None = None) -> dict[str, np.ndarray]:
    """The whole arrays of a checkpoint of a run by path; `folder` contains checkpoints other than those of run.dir."""
    return arrays_of(folder.parent if folder else load_config(config).run.dir, step)


def assert_same_arrays(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Every array is there, bit for bit."""
    assert found.keys() == expected.keys()
    differing = [path for path in expected if found[path].tobytes() != expected[path].tobytes()]
    assert not differing


def listing(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file of a folder, with when it was written and what it holds."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


@contextmanager
def unchanged(folder: Path) -> Iterator[None]:
    """No file of a folder is written, added or removed."""
    before = listing(folder)
    yield
    assert listing(folder) == before


def leave_run(
    config: Path, *overrides: str, steps: tuple[int, ...] = (4, 8), change: Any = None, run: str = ""
) -> Path:
    """Leaves a run directory with checkpoints of some steps.

    `change` maps (path, leaf) of a parameter to a leaf; `run` is the identity, "" for a run of an earlier version.
    """
    loaded = load_config(config, overrides)
    built = build(loaded)
    folder = Path(loaded.run.dir)
    folder.mkdir(parents=True, exist_ok=True)
    header = Identity(run, str(folder)).header() if run else ""
    (folder / "config.yaml").write_text(header + resolved_yaml(loaded), encoding="utf-8")
    abstract = built.step.abstract_state()
    about = describe_run(built) | ({RUN: run} if run else {})
    with Checkpoints(folder / "checkpoints", keep=9, abstract_state=abstract, about=about) as checkpoints:
        for step in steps:
            state = built.step.init(step)
            if change is not None:
                state = state._replace(params=map_with_path(change, state.params))
            checkpoints.save(step, state)
    return folder


def whole(params) -> dict[str, np.ndarray]:
    """Parameters as arrays of the host, by path."""
    return {path: np.asarray(leaf) for path, leaf in leaves_with_paths(params)}


def saved_params(config: Path, seed: int, *overrides: str) -> dict[str, np.ndarray]:
    """What `leave_run` saved as the parameters of a step: those that a model draws from that seed."""
    built = build(load_config(config, overrides))
    return whole(stored_order(built.layouts).to_model(built.step.init(seed).params))


def arrays_of(folder: Path | str, step: int | None = None) -> dict[str, np.ndarray]:
    """Returns the global arrays of a checkpoint of `run.dir` by path; the latest step by default."""
    import jax
    import orbax.checkpoint as ocp

    checkpoints = Path(folder).absolute() / "checkpoints"
    found = latest_checkpoint(checkpoints) if step is None else checkpoints / str(step)
    assert found is not None, f"{checkpoints} holds no complete checkpoint"
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler(state=ocp.PyTreeCheckpointHandler())) as reader:
        tree = reader.metadata(found).item_metadata["state"].tree
        as_numpy = jax.tree.map(lambda leaf: ocp.RestoreArgs(restore_type=np.ndarray), dict(tree))
        wanted = ocp.args.PyTreeRestore(restore_args=as_numpy)
        arrays = reader.restore(found, args=ocp.args.Composite(state=wanted))["state"]
    return {path: np.asarray(array) for path, array in arrays.items()}


def same_run(folder: Path | str, expected: Path | str) -> list[str]:
    """Returns the differences between two runs as lines, from their `run.dir`; empty if they are bitwise identical."""
    found, wanted = ({record["step"]: repr(record) for record in metrics(Path(each))} for each in (folder, expected))
    problems = [
        f"step {step}: {found.get(step)} and {wanted.get(step)}"
        for step in sorted({*found, *wanted})
        if found.get(step) != wanted.get(step)
    ]
    arrays, others = arrays_of(folder), arrays_of(expected)
    problems += [f"{path}: in one of them only" for path in sorted(arrays.keys() ^ others.keys())]
    problems += [
        f"{path}: other bits"
        for path in sorted(arrays.keys() & others.keys())
        if (arrays[path].dtype, arrays[path].tobytes()) != (others[path].dtype, others[path].tobytes())
    ]
    return problems[:10]


EXAMPLES = TESTS.parent / "examples"


def example(name: str) -> ModuleType:
    """The module of an example."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
