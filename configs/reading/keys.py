"""Every dotted key of a config, and the ones that a bare name may stand for."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from ...mesh.near_miss import nearest
from ...models.catalog import MODELS
from ...models.lora import LoRAConfig
from ...parallel.sharding.strategies import option_types
from ..schema import Config, ModelCheck
from .synonyms import known_synonyms, meant_by

MOST_KEYS = 3
"""That are named for one name."""


def sections() -> tuple[str, ...]:
    """Returns the names of all sections."""
    return tuple(field.name for field in fields(Config) if field.name != "source")


@cache
def config_keys() -> tuple[str, ...]:
    """Returns every dotted key, those of all strategies and of all models of the catalogue among them."""
    values = {name: getattr(Config(), name) for name in sections()}
    keys = [key for name, value in values.items() if is_dataclass(value) for key in _below(name, value)]
    keys += [f"model.{name}" for name in ("name", *(field.name for field in fields(ModelCheck)))]
    keys += [f"model.lora.{field.name}" for field in fields(LoRAConfig)]
    keys += [f"model.{field.name}" for options, _ in MODELS.values() for field in fields(options)]
    for name, options in option_types().items():
        keys += [f"strategy.{name}", *(f"strategy.{name}.{field.name}" for field in fields(options))]
    return tuple(dict.fromkeys(keys))


def _below(path: str, section: Any) -> Iterator[str]:
    """The dotted keys of a section and of those in it."""
    for field in fields(section):
        value, key = getattr(section, field.name), f"{path}.{field.name}"
        yield from _below(key, value) if is_dataclass(value) else (key,)


def keys_meant_by(name: str, *, exact: bool = False) -> list[str]:
    """Returns the keys that a name may stand for, such as `steps`, `lr`, `train.steps` or `global-batch`.

    Args:
        name: A key, its last part, what another library calls it, or something near to one of these.
        exact: Leave out what is only near.

    Returns:
        At most MOST_KEYS keys; none where nothing is near.
    """
    name = name.replace("-", "_")
    keys = config_keys()
    if name in keys:
        return [name]
    ending = sorted((key for key in keys if key.endswith(f".{name}")), key=lambda key: key.count("."))
    if ending:
        return ending[:MOST_KEYS]
    meant = meant_by(name)
    if meant:
        return [meant]
    if exact:
        return []
    last_parts = {key.rpartition(".")[2] for key in keys}
    near = nearest(name, [*keys, *sorted(last_parts), *known_synonyms()], cutoff=0.75)
    return keys_meant_by(near[0]) if near else []
