"""From the combinations of a sweep to its runs: the config and the folder of each. No device is opened."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from ...configs.checks import REST, axis_sizes
from ...configs.load import load_config
from ...configs.reading.reader import read_yaml
from ...configs.restarts import rule_of
from ...configs.schema import Config
from ...configs.write import as_plain
from ...mesh.errors import UserError
from ...training.report.comparison import MISSING
from ..local import LocalTarget
from ..reporting.compare import config_differences
from ..reporting.facts import read_facts
from ..run.directory.folder import is_run
from .combinations import Combination, combine

OF_THE_TABLE = ("checkpoint.start_from", "checkpoint.start_fresh", "eval.batches", "optimizer.ema.evaluate")
"""Keys that a restart may change, and that figures of the table depend on all the same."""


class Asked(NamedTuple):
    """What a sweep is asked for.

    Attributes:
        source: A YAML file or the name of a preset.
        words: `key=V1,V2,...` or `key=value` each.
        zipped: Take the first values of all keys together, then the second ones.
        skip_invalid: Leave out combinations that cannot run; without it none is trained.
        fresh: Start every run anew.
        on: Processes of each run, on this machine; None = one, as `spmdkit train` starts it.
    """

    source: str
    words: Sequence[str] = ()
    zipped: bool = False
    skip_invalid: bool = False
    fresh: bool = False
    on: LocalTarget | None = None


@dataclass(frozen=True, kw_only=True)
class SweptRun:
    """One run of a sweep, before it is trained.

    Attributes:
        combination: its values.
        overrides: every `key=value` that it is trained with, its folder included.
        config: from these; None where they are no config.
        problem: why it cannot run; "" where nothing is known against it.
        exit_code: what a command ends with for that reason.
        is_finished: whether its folder holds all of its steps.
        costs: what it holds and sends, as `look` finds it; empty where nobody has looked.
    """

    combination: Combination
    overrides: tuple[str, ...]
    config: Config | None = None
    problem: str = ""
    exit_code: int = 0
    is_finished: bool = False
    costs: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """That of the combination."""
        return self.combination.name

    @property
    def folder(self) -> Path | None:
        """Where it lives; None where it has no config."""
        return Path(self.config.run.dir) if self.config else None


def plan(asked: Asked) -> list[SweptRun]:
    """Reads the config of every combination, and looks into the folders that are there.

    Args:
        asked: What for.

    Returns:
        The runs, in order; those that cannot be say why.

    Raises:
        ConfigError: The values cannot be combined.
    """
    return [_planned(asked, each) for each in combine(asked.words, zipped=asked.zipped)]


def _planned(asked: Asked, combination: Combination) -> SweptRun:
    """The run of one combination."""
    overrides = combination.overrides
    try:
        overrides = _with_devices(asked, combination)
        config = _config(asked, overrides)
        folder = Path(config.run.dir) / combination.name
        config = replace(config, run=replace(config.run, dir=str(folder)))
        if not asked.fresh:
            check_unchanged(folder, config)
    except UserError as error:
        return SweptRun(combination=combination, overrides=overrides, problem=str(error), exit_code=error.exit_code)
    overrides = (*overrides, f"run.dir={json.dumps(config.run.dir, ensure_ascii=False)}")
    is_finished = not asked.fresh and _is_finished(folder, config.train.steps)
    return SweptRun(combination=combination, overrides=overrides, config=config, is_finished=is_finished)


def _config(asked: Asked, overrides: Sequence[str]) -> Config:
    processes, devices = asked.on or (1, None)
    return load_config(asked.source, overrides, num_processes=processes, simulate=devices)


def _with_devices(asked: Asked, combination: Combination) -> tuple[str, ...]:
    """The overrides of a run; where strategies are swept, it simulates as many devices as the mesh of each has.

    So it is where devices are simulated, nobody says how many on the command line, and no axis has the rest of them.
    """
    overrides = combination.overrides
    of_strategy = any(key.partition(".")[0] == "strategy" for key in combination.values)
    if asked.on or not of_strategy or any(word.startswith(("run.simulate=", "run=")) for word in overrides):
        return overrides
    config = load_config(asked.source, overrides, sizes=False)
    sizes = axis_sizes(config).values()
    if not config.run.simulate or REST in sizes:
        return overrides
    return (*overrides, f"run.simulate={prod(sizes)}")


def check_unchanged(folder: Path, config: Config) -> None:
    """Makes sure that what a folder holds of a run is of the same config, so that the table compares what it says.

    `train.steps` may be raised, and what changes no number of the table may be another.

    Args:
        folder: Of the run; it need not exist.
        config: What it is to be.

    Raises:
        UserError: A key differs.
    """
    path = folder / "config.yaml"
    if not path.is_file() or not is_run(folder):
        return
    before = read_yaml(path.read_text(encoding="utf-8", errors="replace")).value
    if not isinstance(before, dict):
        return  # told when the run is checked
    found = config_differences([before, as_plain(config), as_plain(Config())])
    changed = {key: values for key, values in found.items() if _counts(key, *values)}
    if changed:
        told = "; ".join(f"{key}: {_shown(then)} then, {_shown(now)} now" for key, (then, now, _) in changed.items())
        raise UserError(
            f"{folder} holds a run of another config: {told}. Set it back, give another run.dir, or start anew with "
            "--fresh."
        )


def _counts(key: str, then: Any, now: Any, default: Any) -> bool:
    """Whether a run with another value of a key is another run; a key that a file of before lacks has its default."""
    rule = rule_of(key)
    if then == now or (then is MISSING and now == default):
        return False
    if key == "train.steps":
        return isinstance(then, int) and now < then
    return rule is None or rule.kind != "any" or key in OF_THE_TABLE


def _shown(value: Any) -> str:
    return "nothing" if value is MISSING else repr(value)


def _is_finished(folder: Path, steps: int) -> bool:
    facts = read_facts(folder)
    return facts is not None and facts.finished >= steps
