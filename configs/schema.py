"""Every section and key of a config, with its type, default, range and description.

Sections of other packages are defined next to the code that uses them: `data` in data/config.py, `optimizer` in
training/optimizing/optimizer_config.py, `precision` in parallel/options.py, the options of each strategy in
parallel/, of each model in models/, of each callback in training/callbacks/. `launch` is in launch_config.py, the rest
is here. Checks of keys against each other are in checks.py.

An integer with a name that ends in `_bytes` or `_floor` also accepts a size such as "64KiB".
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, Lt

from ..data.config import DataConfig
from ..layouts.paths import pattern_problem
from ..mesh.errors import raise_problems
from ..mesh.files import is_url
from ..parallel.options import LocalPath, Precision
from ..parallel.sharding.strategies import option_types
from ..training.optimizing.optimizer_config import OptimizerConfig
from .launch_config import Count, LaunchConfig, Positive


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The run directory, code and compilation; only `seed` changes the numbers."""

    dir: LocalPath = ""
    """Directory of checkpoints, metrics, logs and report; empty = runs/<name of the YAML file>. Training again with the
    same directory resumes the run."""
    root: LocalPath = ""
    """Directory that relative paths start from (data.files, data.eval_files, the CSV file of a schedule), and the first
    one that is searched for your modules; empty = the directory of the YAML file, for a preset the working directory.
    Paths in key=value arguments, and run.dir, start from the working directory."""
    allow: tuple[str, ...] = ()
    """Packages and modules elsewhere that this config may name as module:function, such as ["my_package", "optax"].
    Without it, a name must refer to a file in run.root or in the working directory."""
    seed: Annotated[int, Ge(0), Le(2**32 - 1)] = 0
    """Seed of the initial parameters, the order of examples and dropout; the same on every mesh."""
    simulate: Annotated[int, Ge(0), Le(4096)] = 0
    """CPU devices that each process simulates; 0 = use the real devices of the machine."""
    log_every: Positive = 10
    """Steps between two records of metrics."""
    cache: str = ""
    """Directory of compiled programs, which the next start reads instead of compiling; none = no cache; empty =
    JAX_COMPILATION_CACHE_DIR if it is set, otherwise spmdkit/programs in the user's cache directory ($XDG_CACHE_HOME or
    ~/.cache). The hosts of one run must share it."""
    xla: Literal["default", "none"] | tuple[str, ...] = "default"
    """XLA options for compiling the step: default, options that were measured to be faster on the devices of the run;
    none; or a list such as [xla_gpu_enable_latency_hiding_scheduler=true]. Options in XLA_FLAGS stay as they are."""

    def __post_init__(self) -> None:
        wrong = [name for name in self.allow if not all(part.isidentifier() for part in name.split("."))]
        problems = [f"run.allow: {name!r} is not a valid module name, such as my_package." for name in wrong]
        if is_url(self.cache):
            fix = f"Remove run.cache and set the environment variable JAX_COMPILATION_CACHE_DIR={self.cache}."
            problems.append(f"run.cache: {self.cache!r} is not a directory of a file system. {fix}")
        options = () if isinstance(self.xla, str) else self.xla
        wrong = [option for option in options if not re.fullmatch(r"(--)?xla_\w+(=[^\s=]+)?", option)]
        problems += [f"run.xla: {each!r} is not an XLA option such as xla_gpu_autotune_level=2." for each in wrong]
        raise_problems(problems)

    @property
    def search_path(self) -> tuple[Path, ...]:
        """The directories of the user's own modules: `root`, then the working directory."""
        return (Path(self.root or "."), Path.cwd())


@dataclass(frozen=True, kw_only=True)
class ModelCheck:
    """Keys of the section `model` for every model, in addition to `name` and the options of the model."""

    check: Literal["error", "warn", "off"] = "error"
    """Reaction if your own model violates an assumption of training, tested on a few rows when the run is built: error,
    stop before training; warn; off, skip the test. Tests cover the models of the catalog."""


@dataclass(frozen=True, kw_only=True)
class AutoStrategy:
    """In place of all strategies: the mesh, train.accumulate and train.remat are chosen for the available devices."""

    size: Literal[-1] = -1
    """All devices."""


@dataclass(frozen=True, kw_only=True)
class LayoutsConfig:
    """Rules that override the layouts that the strategies choose for parameters."""

    rules: Mapping[str, tuple[str | tuple[str, ...] | None, ...]] = field(default_factory=dict)
    """Regular expression of parameter paths -> one entry per dim: an axis, null (not sharded) or a list of axes."""
    match: Literal["fullmatch", "search", "first"] = "fullmatch"
    """The part of a path that a rule must match: fullmatch, all of it (two rules for one path are an error); search,
    any part (likewise); first, all of it, and the first matching rule wins."""
    unmatched: Literal["error", "warn", "replicate"] = "error"
    """Reaction to a parameter without a layout from a rule or a strategy."""
    unmatched_floor: Count = 1024**2
    """Size in bytes below which such a parameter is silently replicated."""
    indivisible: Literal["error", "replicate", "next_dim"] = "error"
    """Reaction if the size of a dim is not a multiple of its axes: error; replicate, do not shard that dim; next_dim,
    move the axes to the largest unsharded dim that they divide."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The optimizer steps."""

    steps: Annotated[int, Ge(1), Le(2**31 - 1)] = 100
    """Optimizer steps of the whole run, including those before a resume."""
    global_batch: Positive = 32
    """Rows of the batch of one optimizer step, over all devices and microbatches; must be a multiple of data x fsdp x
    accumulate."""
    accumulate: Positive = 1
    """Microbatches that a device processes one after the other for one optimizer step."""
    clip_norm: Annotated[float, Ge(0)] = 1.0
    """Maximum norm of the whole gradient; a larger gradient is scaled down to it. 0 = off."""
    not_finite: Literal["stop", "skip", "roll_back"] = "stop"
    """Reaction to a loss, gradient or parameter that is not finite: stop, exit code 3; skip, discard the update;
    roll_back, return to the latest checkpoint and skip the batch from then on."""
    most_not_finite: Annotated[int, Ge(1), Le(2**31 - 1)] = 3
    """With skip, the maximum number of consecutive discarded updates; with roll_back, of rollbacks of the whole run.
    The next one stops the run."""
    remat: Literal["none", "dots", "selective", "local", "full"] = "none"
    """Values that the backward pass recomputes, so that they are not stored: none; dots, all but matrix products;
    selective, also the products that widen their input; local, all but block inputs and what gathers and
    reduce-scatters within a block (of tensor) return; full, all but block inputs."""

    @property
    def max_skips(self) -> int:
        """Consecutive updates that may be discarded; 0 unless `not_finite` is skip."""
        return self.most_not_finite if self.not_finite == "skip" else 0

    @property
    def max_rollbacks(self) -> int:
        """Rollbacks of the whole run; 0 unless `not_finite` is roll_back."""
        return self.most_not_finite if self.not_finite == "roll_back" else 0


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation on the held-out split."""

    every: Count = 100
    """Steps between two evaluations; 0 = only at the end."""
    batches: Count = 0
    """Batches of one evaluation; 0 = the whole split."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints, saved while training continues."""

    every: Count = 100
    """Steps between two checkpoints; 0 = only at the end."""
    keep: Positive = 3
    """Number of latest checkpoints to keep; older ones are removed."""
    start_from: LocalPath = ""
    """Directory of another run, or of one of its checkpoints (runs/old, runs/old/400): a new run starts with its
    parameters and a new optimizer state. A relative path starts from the working directory. Used at step 0 only."""
    start_fresh: tuple[str, ...] = ()
    """Regular expressions of the paths of parameters that are initialized instead of read from there, such as
    head/.*"""

    def __post_init__(self) -> None:
        found = map(pattern_problem, self.start_fresh)
        raise_problems(f"checkpoint.start_fresh: {problem}" for problem in found if problem)


MIN_WRITING, A_WEEK = 1200, 604800
"""Seconds."""


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Timeouts of the processes of a run, in seconds."""

    rendezvous: Positive = 300
    """For all processes to join at the start."""
    heartbeat: Positive = 30
    """Without a heartbeat of a process, before it counts as dead."""
    shutdown: Positive = 120
    """For all processes to finish after the first has."""
    step: Count = 1800
    """For a step, a batch of data or a save; after that, the run ends and reports the process that blocks it; 0 =
    never."""
    first_step: Count = 0
    """For the first step of a process, in which devices connect; 0 = the same as `step`."""
    evaluation: Count = 0
    """For a batch of an evaluation; 0 = the same as `step`."""
    save: Count = 0
    """For the part of a save that training waits for, and the minimum for writing it in the background; 0 = the
    same as `step`."""
    stop: Positive = 120
    """After a signal, for the run to finish its step, save and end; then `spmdkit launch` kills the processes."""

    @property
    def writing(self) -> int:
        """Timeout of writing a checkpoint in the background, as long as training may wait for it or longer."""
        return min(max(MIN_WRITING, self.save or self.step or A_WEEK), A_WEEK)


@dataclass(frozen=True, kw_only=True)
class GuardsConfig:
    """Checks of a run during training; none of them changes the numbers."""

    replicas_every: Count = 0
    """Steps between two comparisons of the replicas of parameters and optimizer state, which detect a flipped bit and
    name its device. 0 = only before every save."""
    stragglers: Annotated[float, Ge(0), Lt(1)] = 0.2
    """A process is reported as slow if its own work (waiting for data, Python) delays every step by more than this
    fraction of the step; 0 = off."""
    straggler_steps: Annotated[int, Ge(2)] = 20
    """Number of steps, most of them slow, after which a process is reported."""
    ledger: bool = True
    """Write where the time of the run went to goodput.jsonl."""


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """The text that a language model generates at the end of the run."""

    length: Annotated[int, Ge(0), Le(1_000_000)] = 200
    """Tokens to generate; 0 = none."""
    temperature: Annotated[float, Ge(0)] = 0.8
    """0 = always the most likely token; 1 = the model's own distribution."""
    prompt: str = "def "
    """The beginning of the text."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """The configuration of a whole run.

    Attributes:
        source: The YAML file of the config. Not a key.
    """

    run: RunConfig = field(default_factory=RunConfig)
    model: Mapping[str, Any] = field(default_factory=lambda: {"name": "transformer"})
    """`name` (a model of the catalog or your own `module:function`), `check`, `lora`, and the options of that model."""
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    strategy: Mapping[str, Any] = field(default_factory=lambda: {"data": option_types()["data"](size=-1)})
    """Mesh axis -> its size, or its strategy's options; -1 = the remaining devices; `fsdp` = {fsdp: -1}; `auto` = a
    search."""
    layouts: LayoutsConfig = field(default_factory=LayoutsConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    precision: Precision = field(default_factory=Precision)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    timeouts: Timeouts = field(default_factory=Timeouts)
    guards: GuardsConfig = field(default_factory=GuardsConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    callbacks: tuple[Mapping[str, Any], ...] = ()
    """Actions around the steps, in order: names, mappings of a name and options, or your own module:function."""
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    source: Path | None = field(default=None, compare=False, repr=False)
