"""From a YAML file and overrides to a checked Config; everything that is wrong is told at once."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from ..mesh.near_miss import did_you_mean
from ..mesh.text import counted
from ..models.catalog import MODELS
from ..models.lora import LoRAConfig
from ..parallel.sharding.strategies import option_types
from .callbacks import to_callbacks
from .checks import layout_problems, size_problems
from .elastic import elastic_problems, not_fitting
from .errors import ConfigError as ConfigError
from .errors import Problem
from .not_finite import policy_problems
from .paths import anchor_overrides, find_root
from .presets import PRESETS as PRESETS
from .presets import preset_names as preset_names
from .reading.blame import config_error
from .reading.convert import below, to_dataclass, unknown_key
from .reading.named_code import code_problems
from .reading.overrides import apply_overrides, sizes_to_options
from .reading.reader import Document, read_text, read_yaml
from .reading.synonyms import remark
from .reading.words import shown
from .run_folders import of_run_folder, run_of_checkpoint
from .schema import Config, ModelCheck

ON_COMMAND_LINE = "on the command line"


def load_config(
    source: str | Path,
    overrides: Sequence[str] = (),
    *,
    num_processes: int | None = 1,
    simulate: int | None = None,
    sizes: bool = True,
    said: str = ON_COMMAND_LINE,
) -> Config:
    """Reads, completes and checks a config. Opens no device.

    Args:
        source: A YAML file, the name of a preset ("quickstart"), or the folder of a run (see `run_folders`).
        overrides: `key=value` each, the key dotted, the value YAML: "train.steps=20", "strategy.fsdp=2".
        num_processes: Processes of the run; None = as many as the section `launch` says.
        simulate: CPU devices that each process simulates, in place of `run.simulate`.
        sizes: Whether strategy, batch and devices have to fit each other; not so of a run whose mesh is chosen later.
        said: Where the overrides stand, for messages.

    Returns:
        The config; every key has a value.

    Raises:
        ConfigError: Unknown keys, wrong types, sizes that do not multiply out, an unknown preset, code elsewhere that
            run.allow does not list: all of them.
    """
    source, overrides = of_run_folder(source, overrides)
    path = find_config(source)
    document = _read_file(path)
    tree = document.value if isinstance(document.value, dict) else {}
    problems, given_by = apply_overrides(tree, overrides)
    sizes_to_options(tree)
    root = find_root(tree, given_by, None if path.parent == PRESETS else path.parent)
    anchor_overrides(tree, given_by, root)
    problems = [*document.problems, *problems]
    if not isinstance(document.value, dict) and not document.is_empty and not document.problems:
        problems.append(Problem("", f"the file must be a mapping of sections, not {shown(document.value)}."))
    config = to_config(tree, problems)
    run = replace(config.run, dir=config.run.dir or f"runs/{path.stem}", root=str(root))
    config = replace(config, run=run, source=path)
    problems += _cross_checks(config, problems, num_processes, simulate, sizes)
    if not any(problem.path.startswith("run") for problem in problems):
        problems += code_problems(config)
    if problems:
        raise config_error(problems, _shown_path(path), document.lines, given_by, said)
    return config


def find_config(source: str | Path) -> Path:
    """Returns the file meant: `source` itself where there is such a file, otherwise the preset of that name.

    Raises:
        ConfigError: There is neither; names the nearest presets.
    """
    if source == "":  # to Path, the working directory
        given = f"give the path of a YAML file, a preset or the folder of a run. Presets: {', '.join(preset_names())}."
        raise ConfigError([given], "an empty name")
    path = Path(source)
    if os.path.isfile(path):
        return path
    preset = PRESETS / f"{path.name.removesuffix('.yaml')}.yaml"
    if path.parent == Path() and os.path.isfile(preset):
        return preset
    raise ConfigError([_no_config(path)], str(source))


def _no_config(path: Path) -> str:
    """Why a path is no config."""
    names = preset_names()
    presets = f"Presets: {', '.join(names)}."
    try:
        path.stat()
    except FileNotFoundError:
        near = did_you_mean(path.name.removesuffix(".yaml"), names, count=3)
        return f"there is no such file, nor a preset of that name.{near} {presets}"
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        return f"there is no such file, nor a preset of that name: {reason}. {presets}"
    if not path.is_dir():
        return f"this is no regular file. Give the path of a YAML file, or a preset. {presets}"
    run = run_of_checkpoint(path)
    if run is not None:
        return (
            f"this folder holds checkpoints of the run {run}. To go on with that run, give {run}; to begin another "
            f"with its parameters, give a config with another run.dir and checkpoint.start_from={path}."
        )
    files = sorted(each.name for each in path.glob("*.yaml"))[:5]
    hint = f"a file in it ({', '.join(files)})" if files else "a YAML file"
    return f"this is a folder. Give {hint}, or a preset. {presets}"


def find_preset(name: str) -> str:
    """Returns the name of a preset, given with or without `.yaml`.

    Raises:
        ConfigError: There is none; names the nearest.
    """
    names, stem = preset_names(), name.removesuffix(".yaml")
    if stem in names:
        return stem
    near = did_you_mean(stem, names, count=3)
    raise ConfigError([f"there is no such preset.{near} Presets: {', '.join(names)}."], name or "an empty name")


def to_config(tree: Mapping[str, Any], problems: list[Problem]) -> Config:
    """Builds a Config from plain values, adding what is wrong to `problems`; defaults stand in for it."""
    names = [field.name for field in fields(Config) if field.name != "source"]
    problems += [_unknown_section(key, names) for key in tree if key not in names]
    defaults = Config()
    given: dict[str, Any] = {}
    for name in names:
        default = getattr(defaults, name)
        if name == "model":
            given[name] = _to_model(tree.get(name), problems)
        elif name == "strategy":
            given[name] = _to_strategy(tree[name], problems) if name in tree else default
        elif name == "callbacks":
            given[name] = to_callbacks(tree.get(name), problems)
        else:
            given[name] = to_dataclass(type(default), tree.get(name), name, problems)
    return Config(**given)


def _to_model(value: Any, problems: list[Problem]) -> dict[str, Any]:
    """Returns the model's section with all options of a model of the catalogue, or as given for the user's own."""
    if not isinstance(value, Mapping | None):
        problems.append(Problem("model", f"model must be a mapping such as {{name: transformer}}, not {shown(value)}."))
        value = None
    options = {"name": "transformer", **(value or {})}
    name = options.pop("name")
    given = {"check": options.pop("check")} if "check" in options else {}
    check = _shallow(to_dataclass(ModelCheck, given, "model", problems))
    lora = options.pop("lora", None)
    if lora is not None:
        adapters = to_dataclass(LoRAConfig, lora, "model.lora", problems)
        check |= {} if adapters is None else {"lora": _shallow(adapters)}
    if isinstance(name, str) and ":" in name:
        return {"name": name, **check, **options}
    if name not in MODELS:
        near = (did_you_mean(name, MODELS) or _with_colon(name)) if isinstance(name, str) else ""
        known = ", ".join(sorted(MODELS))
        message = f"model.name must be {known}, or your own as module:function, not {shown(name)}.{near}"
        problems.append(Problem("model.name", message))
        return {"name": "transformer"}
    built = to_dataclass(MODELS[name][0], options, "model", problems)
    return {"name": name, **check, **({} if built is None else _shallow(built))}


def _with_colon(name: str) -> str:
    """What `my_model.make` is likely to mean, as the end of a message; "" of anything else."""
    module, _, function = name.rpartition(".")
    if not all(part.isidentifier() for part in (*module.split("."), function)):
        return ""
    return f" Did you mean {module}:{'make' if function == 'py' else function}?"


def _to_strategy(value: Any, problems: list[Problem]) -> dict[str, Any]:
    """Returns the options of each strategy that is named."""
    if not isinstance(value, Mapping):
        message = (
            "strategy must be a mapping of mesh axes to sizes, such as {fsdp: 4, data: 2}, or one axis, such as fsdp, "
            f"not {shown(value)}."
        )
        problems.append(Problem("strategy", message))
        return {}
    types = option_types()
    problems += [_unknown_strategy(name, value, types) for name in value if name not in types]
    return {
        name: to_dataclass(types[name], options, below("strategy", name), problems)
        for name, options in value.items()
        if name in types
    }


def _unknown_strategy(name: str, given: Mapping[str, Any], types: Mapping[str, type]) -> Problem:
    """Returns the problem of a strategy that does not exist; it may be an option that stands a level too high."""
    key = below("strategy", name)
    first, dot, rest = name.partition(".")
    if dot and first in types:
        example = f"Write {first}: {{size: ..., {rest}: ...}}."
        return Problem(key, f"{key} is not a key: in a file, dots do not part keys. {example}")
    homes = [axis for axis, options in types.items() if name in {field.name for field in fields(options)}]
    homes = [axis for axis in homes if axis in given] or homes
    if len(homes) == 1 or (homes and name != "size"):
        meant = " or ".join(f"strategy.{axis}.{name}" for axis in homes)
        example = f"Write {homes[0]}: {{size: ..., {name}: ...}}."
        return Problem(key, f"{key} is not a key. Did you mean {meant}? {example}{remark(name)}")
    return unknown_key(key, list(types))


def _cross_checks(
    config: Config, problems: Sequence[Problem], num_processes: int | None, simulate: int | None, sizes: bool
) -> list[Problem]:
    """Returns what is wrong between sections, leaving out what rests on values already found wrong."""
    wrong = {problem.path.split(".")[0] for problem in problems} | {problem.path for problem in problems}
    found = [] if "layouts" in wrong else layout_problems(config.layouts.rules)
    found += policy_problems(config)
    if not sizes or wrong & {"strategy", "run.simulate", "train.global_batch", "train.accumulate"}:
        return found
    found += elastic_problems(config)
    per_process, launch = simulate or config.run.simulate, config.launch
    if not per_process and num_processes is None and launch.gpus_per_process:
        total = launch.num_processes * launch.gpus_per_process
        factors = ("nodes", "processes_per_node", "gpus_per_process")
        product = " x ".join(f"launch.{name}={getattr(launch, name)}" for name in factors)
        return found + size_problems(config, total, f"{product} gives {counted(total, 'GPU')}")
    if not per_process:
        return found + size_problems(config, None)
    num_processes = num_processes or launch.num_processes
    total = per_process * num_processes
    if config.launch.elastic:
        return found or not_fitting(config, total, num_processes)
    known_from = f"run.simulate={total} gives {counted(total, 'device')}"
    if simulate or num_processes > 1:
        processes, gives = counted(num_processes, "process", "processes"), "gives" if num_processes == 1 else "give"
        known_from = f"{processes} with {counted(per_process, 'device')} each {gives} {total}"
    return found + size_problems(config, total, known_from)


def _unknown_section(key: str, names: list[str]) -> Problem:
    """Returns the problem of a section that does not exist, looking for its name among all keys too."""
    sections = {name: getattr(Config(), name) for name in names}
    homes = [f"{name}.{key}" for name, section in sections.items() if is_dataclass(section) and hasattr(section, key)]
    if homes:
        return Problem(key, f"{key} is not a section. Did you mean {' or '.join(homes)}?")
    first, *below_it = key.split(".")
    if below_it and first in names:
        *between, last = below_it
        opening, closing = "".join(f"{{{name}: " for name in between), "}" * len(between)
        written = f"{first}: {opening}{{{last}: ...}}{closing}"
        return Problem(key, f"{key} is not a section: in a file, dots do not part keys. Write {written}.")
    return unknown_key(key, names, "section")


def _read_file(path: Path) -> Document:
    text, problems = read_text(path)
    return Document(None, {}, problems) if problems else read_yaml(text)


def _shallow(instance: Any) -> dict[str, Any]:
    return {field.name: getattr(instance, field.name) for field in fields(instance)}


def _shown_path(path: Path) -> str:
    return f"preset {path.stem}" if path.parent == PRESETS else str(path)
