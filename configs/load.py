"""Loads a config: from a YAML file and overrides to a checked `Config`, with all problems reported at once."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ..mesh.errors import counted, did_you_mean, is_printable
from ..models.catalog import MODELS
from ..models.lora import LoRAConfig
from ..parallel.sharding.strategies import option_types
from ..training.callbacks.callback_catalog import CALLBACKS
from .checks import AUTO, ELASTIC_KEY, elastic_problems, layout_problems, section_problems, size_problems
from .config_errors import ConfigError, Problem, config_error, split_key
from .config_paths import anchor_overrides, code_problems, find_root
from .config_sources import PRESETS, find_config, resolve_run_directory
from .elastic import fit_to_devices
from .key_names import explain_single_value, sections, unknown_key
from .launch_config import LaunchConfig
from .schema import AutoStrategy, Config, ModelCheck
from .secret_variables import redact_override
from .validation import show_value, to_dataclass
from .yaml_reader import read_file, read_yaml

ON_COMMAND_LINE = "on the command line"
CALLBACKS_EXAMPLE = "[csv, {name: early_stopping, patience: 3}]"
EMPTY = "an empty argument"
MAX_SHOWN = 200
"""Characters of an argument in a message."""


def load_config(
    source: str | Path,
    overrides: Sequence[str] = (),
    *,
    num_processes: int | None = 1,
    simulate: int | None = None,
    sizes: bool = True,
    place: str = ON_COMMAND_LINE,
) -> Config:
    """Reads, completes and checks a config. Does not initialize devices.

    Args:
        source: A YAML file, the name of a preset ("quickstart"), or the directory of a run (see `config_sources`).
        overrides: `key=value` arguments with a dotted key and a YAML value: "train.steps=20", "strategy.fsdp=2".
        num_processes: The processes of the run; None = the number in the section `launch`.
        simulate: CPU devices that each process simulates, instead of `run.simulate`.
        sizes: Check that strategy, batch and devices fit each other; False if the mesh of the run is chosen later.
        place: The origin of the overrides for messages.

    Returns:
        The config, with a value for every key.

    Raises:
        ConfigError: All unknown keys, invalid values, sizes that do not fit, and code that run.allow does not list; or
            an unknown preset.
    """
    source, overrides = resolve_run_directory(source, overrides)
    path = find_config(source)
    document = read_file(path)
    tree = document.value if isinstance(document.value, dict) else {}
    problems, given_by = apply_overrides(tree, overrides)
    expand_sizes(tree)
    root = find_root(tree, given_by, None if path.parent == PRESETS else path.parent)
    anchor_overrides(tree, given_by, root)
    problems = [*document.problems, *problems]
    if not isinstance(document.value, dict) and not document.is_empty and not document.problems:
        problems.append(Problem("", f"the file must be a mapping of sections, got {show_value(document.value)}."))
    config = to_config(tree, problems)
    run = replace(config.run, dir=config.run.dir or f"runs/{path.stem}", root=str(root))
    config = replace(config, run=run, source=path)
    problems += _cross_checks(config, problems, num_processes, simulate, sizes)
    if not any(problem.path.startswith("run") for problem in problems):
        problems += code_problems(config)
    if problems:
        name = f"preset {path.stem}" if path.parent == PRESETS else str(path)
        raise config_error(problems, name, document.lines, given_by, place)
    return config


def apply_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> tuple[list[Problem], dict[str, str]]:
    """Sets the value of each override in the tree of plain values, in place.

    A key goes before the mapping that contains it, in any order: `strategy={fsdp: 4}` sets the section, and
    `strategy.fsdp.floor_bytes=1` one option in it. Of two overrides for one key, the last wins. `strategy.fsdp=2` sets
    the size of a strategy and keeps its other options.

    Args:
        tree: The values of the file.
        overrides: `key=value` arguments; the value is YAML.

    Returns:
        The problems of the overrides themselves, and key -> the argument that sets it.
    """
    problems: list[Problem] = []
    given_by: dict[str, str] = {}
    valid: list[tuple[list[str], Any]] = []
    for text in join_split(overrides):
        key, equals, value_text = text.partition("=")
        if text not in overrides:
            given_by[key] = _shorten(text)
            fix = shlex.quote(text)
            problems.append(Problem(key, f"the shell has split it at its spaces. Quote it: {fix}."))
            continue
        if not equals or not all(split_key(key)) or not is_printable(key):
            given_by[text or EMPTY] = _shorten(text)
            problems.append(Problem(text or EMPTY, "it must be key=value, such as train.steps=20."))
            continue
        document = read_yaml(value_text)
        parts = split_key(key)
        if len(parts) == 2 and parts[0] == "strategy" and not isinstance(document.value, dict):
            parts.append("size")
        given_by[".".join(parts)] = _shorten(text)
        problems += [Problem(".".join(parts), problem.message) for problem in document.problems]
        if not document.problems:
            valid.append((parts, document.value))
    for parts, value in sorted(valid, key=lambda override: len(override[0])):
        expand_sizes(tree)
        problems += _set_value(tree, parts, value)
    return problems, given_by


def join_split(overrides: Sequence[str]) -> list[str]:
    """Joins arguments that a shell has split inside brackets: "strategy={fsdp:" and "8}".

    Args:
        overrides: The arguments.

    Returns:
        The same arguments; those of one value with balanced brackets are joined by spaces.
    """
    joined: list[str] = []
    place = 0
    while place < len(overrides):
        count = _count_words(overrides[place:])
        joined.append(" ".join(overrides[place : place + count]))
        place += count
    return joined


def _count_words(words: Sequence[str]) -> int:
    """Returns how many words the value has that the first word begins; 1 if its brackets are never closed."""
    depth = 0
    for count, word in enumerate(words, 1):
        depth += sum(word.count(opening) for opening in "{[") - sum(word.count(closing) for closing in "}]")
        if depth <= 0:
            return count
    return 1


def expand_sizes(tree: dict[str, Any]) -> None:
    """Writes `strategy: {fsdp: 4}` as `strategy: {fsdp: {size: 4}}`, and `strategy: fsdp` with size -1, in place."""
    strategy = tree.get("strategy")
    if isinstance(strategy, str) and strategy.isidentifier():
        tree["strategy"] = {strategy: {"size": -1}}
    if isinstance(strategy, dict):
        for name, value in strategy.items():
            if not isinstance(value, dict):
                strategy[name] = {"size": value}


def _shorten(text: str) -> str:
    """Returns an override on one line, without secrets."""
    if not text.strip():
        return f"{text!r}, {EMPTY}"
    text = redact_override(text)
    short = text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
    return short if is_printable(short) else repr(short)


def _set_value(tree: dict[str, Any], parts: list[str], value: Any) -> list[Problem]:
    """Sets one value and adds missing mappings above it."""
    for depth, part in enumerate(parts[:-1], 1):
        if tree.get(part) is None:
            tree[part] = {}
        if not isinstance(tree[part], dict):
            above = ".".join(parts[:depth])
            return [Problem(".".join(parts), f"{above} is {tree[part]!r}, which cannot have keys below it.")]
        tree = tree[part]
    tree[parts[-1]] = value
    return []


def to_config(tree: Mapping[str, Any], problems: list[Problem]) -> Config:
    """Builds a Config from plain values; adds invalid values to `problems` and uses their defaults."""
    problems += [unknown_key("", key, sections(), "section") for key in tree if key not in sections()]
    defaults = Config()
    special = {"model": _to_model, "strategy": _to_strategy, "callbacks": _to_callbacks}
    given: dict[str, Any] = {}
    for name in sections():
        if name not in special:
            given[name] = to_dataclass(type(getattr(defaults, name)), tree.get(name), name, problems)
        elif name in tree or name == "model":
            given[name] = special[name](tree.get(name), problems)
    return Config(**given)


def _has_type(value: Any, expected: Any, key: str, rule: str, problems: list[Problem]) -> bool:
    if not isinstance(value, expected):
        fix = explain_single_value(key, value)
        if key == "callbacks" and isinstance(value, str):
            fix = f" Did you mean [{value}]?"
        if key == "strategy" and isinstance(value, str):
            fix = _explain_axis(value)
        problems.append(Problem(key, f"{key} must be {rule}, got {show_value(value)}.{fix}"))
    return isinstance(value, expected)


def _explain_axis(text: str) -> str:
    """Returns, after a space, the fix for "fsdp:8", the rest of {fsdp:8,data:2} after a shell has expanded it."""
    axis, colon, size = text.partition(":")
    if not colon or not size.strip():
        return ""
    return f" Write strategy.{axis.strip()}={size.strip()}, or quote a mapping: 'strategy={{fsdp: 4, data: 2}}'."


def _to_model(value: Any, problems: list[Problem]) -> dict[str, Any]:
    """Returns the section with all options of a model of the catalog, or with the given options of the user's model."""
    if not _has_type(value, Mapping | None, "model", "a mapping such as {name: transformer}", problems):
        value = None
    options = {"name": "transformer", **(value or {})}
    given = {"check": options.pop("check")} if "check" in options else {}
    for_all = _options(to_dataclass(ModelCheck, given, "model", problems))
    lora = options.pop("lora", None)
    if lora is not None and (adapters := to_dataclass(LoRAConfig, lora, "model.lora", problems)):
        for_all["lora"] = _options(adapters)
    found = _to_named(options, "model", {name: MODELS[name][0] for name in sorted(MODELS)}, problems)
    return {"name": "transformer"} if found is None else {"name": found.pop("name"), **for_all, **found}


def _to_named(
    given: Mapping[str, Any], key: str, catalog: Mapping[str, type], problems: list[Problem]
) -> dict[str, Any] | None:
    """Returns a name with all options of its class in a catalog, or the user's own as given; None if it is invalid."""
    name, options = given["name"], {option: value for option, value in given.items() if option != "name"}
    if isinstance(name, str) and ":" in name:
        return dict(given)
    if not isinstance(name, str) or name not in catalog:
        problems.append(_unknown_name(f"{key}.name", name, list(catalog)))
        return None
    built = to_dataclass(catalog[name], options, key, problems)
    return None if built is None else {"name": name, **_options(built)}


def _to_callbacks(value: Any, problems: list[Problem]) -> tuple[dict[str, Any], ...]:
    """Returns the section with all options of callbacks of the catalog, and the user's own as given."""
    if not _has_type(value, list | tuple | None, "callbacks", f"a list such as {CALLBACKS_EXAMPLE}", problems):
        return ()
    found = [_to_callback(each, f"callbacks.{place}", problems) for place, each in enumerate(value or ())]
    return tuple(each for each in found if each is not None)


def _to_callback(value: Any, key: str, problems: list[Problem]) -> dict[str, Any] | None:
    value = {"name": value} if isinstance(value, str) else value
    if not isinstance(value, Mapping) or "name" not in value:
        problems.append(Problem(key, f"{key} must be a name or a mapping with a name, as in {CALLBACKS_EXAMPLE}."))
        return None
    found: list[Problem] = []
    callback = _to_named(value, key, CALLBACKS, found)
    # a callback does not know its place in the list
    problems += [Problem(path, text if text.startswith(key) else f"{key}.{text}") for path, text in found]
    return callback


def _unknown_name(key: str, name: Any, known: Sequence[str]) -> Problem:
    """Returns the problem of a name that is neither in a catalog nor the user's own."""
    near = did_you_mean(name, known) if isinstance(name, str) else ""
    dotted = re.fullmatch(r"([^\W\d][\w.]*)\.([^\W\d]\w*)", str(name))
    if dotted and not near:
        near = f" Did you mean {dotted[1]}:{'make' if dotted[2] == 'py' else dotted[2]}?"
    message = f"{key} must be {', '.join(known)}, or your own as module:function, got {show_value(name)}.{near}"
    return Problem(key, message)


def _to_strategy(value: Any, problems: list[Problem]) -> dict[str, Any]:
    """Returns the options of each strategy."""
    rule = "a mapping of mesh axes to sizes, such as {fsdp: 4, data: 2}, or one axis, such as fsdp"
    if not _has_type(value, Mapping, "strategy", rule, problems):
        return {}
    types = {**option_types(), AUTO: AutoStrategy}
    problems += [unknown_key("strategy", name, list(types)) for name in value if name not in types]
    if AUTO in value and len(value) > 1:
        problems.append(Problem("strategy", "strategy: auto chooses all axes, so it must be the only entry."))
    return {
        name: to_dataclass(types[name], options, f"strategy.{name}", problems)
        for name, options in value.items()
        if name in types
    }


def _cross_checks(
    config: Config, problems: Sequence[Problem], num_processes: int | None, simulate: int | None, sizes: bool
) -> list[Problem]:
    """Returns the problems between sections, without those that follow from invalid values."""
    wrong = {problem.path.split(".")[0] for problem in problems} | {problem.path for problem in problems}
    found = [] if "layouts" in wrong else layout_problems(config.layouts.rules)
    between = section_problems(config.train, config.checkpoint, config.precision)
    found += [each for each in between if each.path.split(".")[0] not in wrong]
    if not sizes or wrong & {"strategy", "run.simulate", "train.global_batch", "train.accumulate"}:
        return found
    found += elastic_problems(config.strategy, config.launch.elastic)
    num_devices, known_from = _known_devices(config.launch, config.run.simulate, num_processes, simulate)
    if not config.launch.elastic or num_devices is None:
        return found + size_problems(config.strategy, config.train, config.layouts.rules, num_devices, known_from)
    if not found:
        try:
            fit_to_devices(config, num_devices, num_processes or config.launch.num_processes)
        except ConfigError as error:
            return [Problem(ELASTIC_KEY, problem) for problem in error.problems]
    return found


def _known_devices(
    launch: LaunchConfig, run_simulate: int, num_processes: int | None, simulate: int | None
) -> tuple[int | None, str]:
    """Returns the number of devices of the run, None if it is not known yet, and its origin for messages."""
    if per_process := simulate or run_simulate:
        num_processes = num_processes or launch.num_processes
        total = per_process * num_processes
        if num_processes == 1 and not simulate:
            return total, f"run.simulate={total} gives {counted(total, 'device')}"
        processes = counted(num_processes, "process", "processes")
        give = "gives" if num_processes == 1 else "give"
        return total, f"{processes} with {counted(per_process, 'device')} each {give} {total}"
    if num_processes is None and launch.gpus_per_process:
        total = launch.num_processes * launch.gpus_per_process
        factors = ("nodes", "processes_per_node", "gpus_per_process")
        product = " x ".join(f"launch.{name}={getattr(launch, name)}" for name in factors)
        return total, f"{product} gives {counted(total, 'GPU')}"
    return None, ""


def _options(instance: Any) -> dict[str, Any]:
    return {field.name: getattr(instance, field.name) for field in fields(instance) if field.init}
