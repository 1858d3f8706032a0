"""Every section and key of a config, with its type, default and help.

A section that belongs to another package is described there, beside the code that uses it: `data` in data/config.py,
`optimizer` in training/optimizing/optimizer_config.py, `precision` in parallel/precision.py, `timeouts` in
training/worker.py, `guards` in training/watching/guards.py, the options of each callback in training/callbacks/, of
each strategy in parallel/, of each model in models/; `launch` stands in launching.py, the rest here.

A whole number whose name ends in `_bytes` or `_floor` also accepts text such as "64KiB".
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from ..data.config import DataConfig
from ..layouts.path_patterns import pattern_problem
from ..mesh.errors import UserError
from ..parallel.precision import Precision
from ..parallel.sharding.strategies import option_types
from ..parallel.step.state import seed_problem
from ..training.optimizing.optimizer_config import OptimizerConfig
from ..training.watching.guards import GuardsConfig
from ..training.worker import Timeouts
from .launching import LaunchConfig
from .reading.limits import AtLeast


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where and how the run happens; nothing here changes the numbers but `seed`."""

    dir: str = ""
    """Folder of checkpoints, metrics, logs and report; empty = runs/<name of the YAML file>. Training again with the
    same folder resumes."""
    root: str = ""
    """Folder from which relative paths start (data.files, data.eval_files, the CSV file of a schedule), and where your
    own modules are looked for first; empty = the folder of the YAML file, for a preset the working directory. Paths in
    key=value arguments, and run.dir, start from the working directory."""
    allow: tuple[str, ...] = ()
    """Packages and modules elsewhere that this config may name as module:function, such as ["my_package", "optax"].
    Without it, a name leads to a file in run.root or in the working directory, and to nothing else."""
    seed: Annotated[int, AtLeast(0)] = 0
    """Seed of the initial parameters, the order of examples and dropout, up to 2**32 - 1; the same on every mesh."""
    simulate: Annotated[int, AtLeast(0)] = 0
    """CPU devices that each process simulates; 0 = the machine's real devices."""
    log_every: Annotated[int, AtLeast(1)] = 10
    """Steps between two records of metrics."""
    cache: str = ""
    """Folder of compiled programs, which the next start reads instead of compiling; none = they are not kept; empty =
    JAX_COMPILATION_CACHE_DIR where that is set, otherwise spmdkit/programs in the user's caches ($XDG_CACHE_HOME or
    ~/.cache). Hosts of one run need one that they share."""
    xla: str | tuple[str, ...] = "default"
    """Options of XLA that the step is compiled with: default, those that were found to gain something on the devices of
    the run; none; or a list such as [xla_gpu_enable_latency_hiding_scheduler=true]. What XLA_FLAGS name stays as it is
    there."""

    def __post_init__(self) -> None:
        problem = seed_problem(self.seed, "run.seed")
        wrong = [name for name in self.allow if not all(part.isidentifier() for part in name.split("."))]
        problems = [f"run.allow: {name!r} is no name of a module or package, such as my_package." for name in wrong]
        problems += self._cache_problems() + self._xla_problems()
        if problem or problems:
            raise UserError("\n".join([problem, *problems] if problem else problems))

    def _cache_problems(self) -> list[str]:
        """What `cache` is that no folder is."""
        if self.cache and not self.cache.strip():
            return [f"run.cache: {self.cache!r} is blank; write a folder, none, or leave the key out."]
        if "://" in self.cache:
            fix = f"Leave run.cache out, and set the variable JAX_COMPILATION_CACHE_DIR={self.cache}."
            return [f"run.cache: {self.cache!r} is no folder of a file system. {fix}"]
        return []

    def _xla_problems(self) -> list[str]:
        """What of `xla` is no option."""
        if self.xla in ("default", "none"):
            return []
        if isinstance(self.xla, str):
            return [f"run.xla: {self.xla!r} must be default, none or a list of options; put it into brackets."]
        wrong = [each for each in self.xla if not re.fullmatch(r"(--)?xla_\w+(=[^\s=]+)?", each)]
        return [f"run.xla: {each!r} is no option of XLA, such as xla_gpu_autotune_level=2." for each in wrong]


@dataclass(frozen=True, kw_only=True)
class ModelCheck:
    """What the model's section holds for every model, beside `name` and the model's own options."""

    check: Literal["error", "warn", "off"] = "error"
    """What happens where a model of your own breaks what training relies on, found on a few rows when the run is built:
    error, nothing is trained; warn; off, nobody looks. Models of the catalogue are held to it by tests instead."""


@dataclass(frozen=True, kw_only=True)
class LayoutsConfig:
    """Which mesh axes split which dims of which parameter, where the strategy's own choice is not wanted."""

    rules: Mapping[str, tuple[str | tuple[str, ...] | None, ...]] = field(default_factory=dict)
    """Regular expression of parameter paths -> one entry per dim: an axis, null (not split) or a list of axes."""
    match: Literal["fullmatch", "search", "first"] = "fullmatch"
    """How a rule meets a path: fullmatch, all of it (two rules for one path are an error); search, any part of it
    (likewise); first, all of it, and of several rules the first wins."""
    unmatched: Literal["error", "warn", "replicate"] = "error"
    """What happens to a parameter that no rule and no strategy lays out."""
    unmatched_floor: Annotated[int, AtLeast(0)] = 1024**2
    """Bytes under which such a parameter is replicated without a word."""
    indivisible: Literal["error", "replicate", "next_dim"] = "error"
    """What happens where the size of a dim is no multiple of its axes: error; replicate, keep that dim whole;
    next_dim, move the axes to the largest whole dim that they divide."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The optimizer steps."""

    steps: Annotated[int, AtLeast(1)] = 100
    """Optimizer steps in the whole run, those before a resume included."""
    global_batch: Annotated[int, AtLeast(1)] = 32
    """Rows of the batch of one optimizer step, over all devices and microbatches; a multiple of data x fsdp x
    accumulate."""
    accumulate: Annotated[int, AtLeast(1)] = 1
    """Microbatches that a device works through, one after the other, for one optimizer step."""
    clip_norm: Annotated[float, AtLeast(0)] = 1.0
    """Largest norm of the whole gradient; a longer one is scaled down to it. 0 = off."""
    not_finite: Literal["stop", "skip", "roll_back"] = "stop"
    """What happens where a loss, a gradient or a parameter is not finite: stop, exit code 3; skip, the update is left
    out; roll_back, the run goes back to its newest checkpoint and leaves the batch out from then on."""
    most_not_finite: Annotated[int, AtLeast(1)] = 3
    """Under skip, updates in a row that are left out; under roll_back, rollbacks of the whole run. The next one stops
    it."""
    remat: Literal["none", "dots", "full"] = "none"
    """What backward computes again instead of keeping: nothing, all but matrix products, or all but block inputs."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation on the held-out split."""

    every: Annotated[int, AtLeast(0)] = 100
    """Steps between two evaluations; 0 = only at the end."""
    batches: Annotated[int, AtLeast(0)] = 0
    """Batches of one evaluation; 0 = the whole split."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints, saved while training goes on."""

    every: Annotated[int, AtLeast(0)] = 100
    """Steps between two checkpoints; 0 = only at the end."""
    keep: Annotated[int, AtLeast(1)] = 3
    """The newest checkpoints that are kept; older ones are removed."""
    start_from: str = ""
    """Folder of another run, or of one of its checkpoints (runs/old, runs/old/400): a new run begins with its
    parameters, and with an optimizer of its own. A relative path starts from the working directory. Read at step 0
    alone."""
    start_fresh: tuple[str, ...] = ()
    """Regular expressions of the paths of parameters that are not taken over from there but drawn, such as head/.*"""

    def __post_init__(self) -> None:
        problems = [f"checkpoint.start_fresh: {error}" for error in map(pattern_problem, self.start_fresh) if error]
        if self.start_fresh and not self.start_from:
            problems.append(
                "checkpoint.start_fresh says what is not taken over from another run, and checkpoint.start_from names "
                "none. Set checkpoint.start_from to its folder, or take start_fresh out."
            )
        if problems:
            raise UserError("\n".join(problems))


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """The text a language model writes at the end of the run."""

    length: Annotated[int, AtLeast(0)] = 200
    """Tokens to generate; 0 = none."""
    temperature: Annotated[float, AtLeast(0)] = 0.8
    """0 = always the likeliest token; 1 = the model's own distribution."""
    prompt: str = "def "
    """What the text begins with."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run.

    Attributes:
        source: The YAML file it was read from. Not a key.
    """

    run: RunConfig = field(default_factory=RunConfig)
    model: Mapping[str, Any] = field(default_factory=lambda: {"name": "transformer"})
    """`name`, a model of the catalogue or the user's own `module:function`, `check`, and that model's options."""
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    strategy: Mapping[str, Any] = field(default_factory=lambda: {"data": option_types()["data"](size=-1)})
    """Mesh axis -> its size, or a mapping of its strategy's options; -1 = the rest of the devices; `fsdp` alone
    = {fsdp: -1}."""
    layouts: LayoutsConfig = field(default_factory=LayoutsConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    precision: Precision = field(default_factory=Precision)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    timeouts: Timeouts = field(default_factory=Timeouts)
    guards: GuardsConfig = field(default_factory=GuardsConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    callbacks: tuple[Mapping[str, Any], ...] = ()
    """What happens around the steps, in order: names, mappings of a name and options, or your own module:function."""
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    source: Path | None = field(default=None, compare=False, repr=False)
