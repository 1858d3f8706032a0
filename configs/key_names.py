"""Names of config keys: every key, its synonyms in other libraries, and suggestions for unknown keys."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from ..mesh.axes import SYNONYMS as AXIS_SYNONYMS
from ..mesh.errors import did_you_mean, nearest
from ..models.catalog import MODELS
from ..models.lora import LoRAConfig
from ..parallel.sharding.strategies import axis_names, option_types
from .config_errors import Problem
from .schema import Config, ModelCheck

MAX_SUGGESTIONS = 3
_TABLES = yaml.safe_load((Path(__file__).parent / "synonyms.yaml").read_text(encoding="utf-8"))
SYNONYMS: dict[str, str] = _TABLES["synonyms"]
"""Key -> its names in other libraries, in lowercase; the synonyms of axes are in mesh/axes.py."""
REMARKS: dict[str, str] = _TABLES["remarks"]
"""Synonyms -> the difference, if our value has another meaning."""
MAIN_KEYS: dict[str, str] = _TABLES["main_keys"]
"""Section -> the key that a single value in place of the section means."""
VALUES: dict[str, dict[Any, str]] = _TABLES["values"]
"""Key -> its values in other libraries, in lowercase -> ours."""
SIZES = ("degree", "devices", "num_devices", "world_size", "num_stages", "stages", "ways", "n")
"""Names in other libraries for the size of an axis, such as `pipe: {stages: 4}`."""
_PAIRS = [(name, key) for key, names in SYNONYMS.items() for name in names.split()]
_PAIRS += [(name, f"strategy.{axis}") for name, axis in AXIS_SYNONYMS.items()]


def find_synonym(path: str) -> str | None:
    """Returns the key for which other libraries use an unknown key, or None.

    Args:
        path: The unknown dotted key, such as `strategy.dp`, `train.lr` or `lr`. Keys of its own section go first; an
            axis is only suggested in `strategy`.
    """
    section, _, name = path.rpartition(".")
    name = name.lower()
    axis = section.removeprefix("strategy.")
    if axis in axis_names() and section != axis and (name in (axis, *SIZES) or AXIS_SYNONYMS.get(name) == axis):
        return f"{section}.size"
    keys = [key for synonym, key in _PAIRS if synonym == name]
    own = [key for key in keys if key.startswith(f"{section}.")]
    others = [key for key in keys if section != "strategy" and not (section and key.startswith("strategy."))]
    return next(iter([*own, *others]), None)


def explain_single_value(section: str, value: Any) -> str:
    """Returns, after a space, the key that a single value in place of a section means, or "".

    Args:
        section: The section: "precision".
        value: The value: "bf16".
    """
    if section not in MAIN_KEYS or not isinstance(value, str | int | float) or isinstance(value, bool):
        return ""
    name = MAIN_KEYS[section]
    lowered = value.lower() if isinstance(value, str) else value
    meant = VALUES.get(f"{section}.{name}", {}).get(lowered, value)
    return f" Did you mean {section}.{name}={meant} (in a file, {section}: {{{name}: {meant}}})?"


def find_remark(name: str) -> str:
    """Returns, after a space, the difference between a synonym and our key, or "".

    Args:
        name: A synonym as typed: `epochs`, `train.epochs`, `--epochs`.
    """
    name = name.rpartition(".")[2].lstrip("-").replace("-", "_").lower()
    return next((f" {remark}" for names, remark in REMARKS.items() if name in names.split()), "")


def unknown_key(parent: str, name: str, valid: Sequence[str], kind: str = "key") -> Problem:
    """Returns the problem of an unknown key, with the most similar valid key or all valid keys.

    Args:
        parent: The dotted key of the mapping that contains it; "" for the whole config.
        name: The unknown key.
        valid: The valid keys there.
        kind: The word for a key in the message.
    """
    prefix = f"{parent}." if parent else ""
    path = prefix + name
    first, dot, rest = name.partition(".")
    if dot and first in valid:
        nested = f"{first}: {{{rest.replace('.', ': {')}: ...{'}' * name.count('.')}"
        hint = f" In a file, dots do not separate keys: write {nested}."
    elif name.partition(":")[0] in valid:
        hint = f" YAML needs a space after a colon: {name.replace(':', ': ', 1)}."
    elif found := _keys_for(prefix, name):
        found = [prefix + last if parent and (last := key.rpartition(".")[2]) in valid else key for key in found]
        hint = f" Did you mean {' or '.join(dict.fromkeys(found))}?{find_remark(name)}"
    else:
        hint = did_you_mean(name, valid, prefix=prefix) or f" Valid {kind}s: {', '.join(valid)}."
    return Problem(path, f"{path} is not a valid {kind}.{hint}")


def _keys_for(prefix: str, name: str) -> list[str]:
    """Returns at most MAX_SUGGESTIONS keys below a prefix that end with a name, or the key of which it is a synonym."""
    ending = [key for key in config_keys() if key.startswith(prefix) and key.endswith(f".{name}")]
    ending = sorted((key for key in ending if key != prefix + name), key=lambda key: key.count("."))
    synonym = find_synonym(prefix + name)
    return ending[:MAX_SUGGESTIONS] or ([synonym] if synonym else [])


def sections() -> tuple[str, ...]:
    """Returns the names of all sections."""
    return tuple(field.name for field in fields(Config) if field.name != "source")


@cache
def config_keys() -> tuple[str, ...]:
    """Returns every dotted key, including those of all strategies and all models of the catalog."""
    values = {name: getattr(Config(), name) for name in sections()}
    keys = [key for name, value in values.items() if is_dataclass(value) for key in _keys_below(name, value)]
    keys += [f"model.{name}" for name in ("name", *(field.name for field in fields(ModelCheck)))]
    keys += [f"model.lora.{field.name}" for field in fields(LoRAConfig)]
    keys += [f"model.{field.name}" for options, _ in MODELS.values() for field in fields(options)]
    for name, options in option_types().items():
        keys += [f"strategy.{name}", *(f"strategy.{name}.{field.name}" for field in fields(options))]
    return tuple(dict.fromkeys(keys))


def _keys_below(path: str, section: Any) -> Iterator[str]:
    """Yields the dotted keys of a section and of its subsections."""
    for field in fields(section):
        value, key = getattr(section, field.name), f"{path}.{field.name}"
        yield from _keys_below(key, value) if is_dataclass(value) else (key,)


def suggest_keys(name: str) -> list[str]:
    """Returns at most MAX_SUGGESTIONS keys for a name such as `steps`, `lr`, `train.steps` or `global-batch`.

    Args:
        name: A key, its last part, a name from another library, or a misspelling of one of these.
    """
    name = name.replace("-", "_")
    keys = config_keys()
    if name in keys:
        return [name]
    if found := _keys_for("", name):
        return found
    last_parts = {key.rpartition(".")[2] for key in keys}
    near = nearest(name, [*keys, *sorted(last_parts), *sorted({synonym for synonym, _ in _PAIRS})], cutoff=0.75)
    return suggest_keys(near[0]) if near else []
