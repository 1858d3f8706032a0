"""A config as text: the resolved YAML of a run, and the reference of all keys."""

import dataclasses
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, get_type_hints

import yaml

from ..models.catalog import MODELS
from ..models.lora import LoRAConfig
from ..parallel.sharding.strategies import option_types
from ..training.callbacks.catalog import CALLBACKS
from .help import field_help
from .reading.convert import has_default, options_by_key
from .reading.reader import SCALARS
from .reading.words import describe
from .schema import Config, ModelCheck
from .secret_variables import redact_config


def resolved_yaml(config: Config) -> str:
    """Returns every key of a config with its value, but for secrets; reading it back gives an equal config."""
    return yaml.dump(as_plain(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def as_plain(config: Config) -> dict[str, Any]:
    """Returns a config as dicts, lists and scalars; null stands for the values of secrets."""
    sections = [field.name for field in dataclasses.fields(Config) if field.name != "source"]
    return redact_config({name: _plain(getattr(config, name)) for name in sections})


def describe_config() -> str:
    """Returns all sections and keys with types, defaults and help, for `spmdkit train --help-config`."""
    help_of, defaults = field_help(Config), Config()
    lines = ["Every key of a config, with its default. YAML files and key=value arguments set them."]
    for field in dataclasses.fields(Config):
        if field.name == "source":
            continue
        value = getattr(defaults, field.name)
        if field.name == "model":
            lines += ["", f"model: {help_of['model']}", *_describe_fields(ModelCheck)]
            lines += ["", f"model.lora: {_summary(LoRAConfig)}", *_describe_fields(LoRAConfig)]
            for name, (options, _) in sorted(MODELS.items()):
                lines += ["", f"model: (name: {name})", *_describe_fields(options)]
        elif field.name == "strategy":
            lines += ["", f"strategy: {help_of['strategy']}"]
            for name, options in option_types().items():
                lines += ["", f"strategy.{name}: {_summary(options)}", *_describe_fields(options)]
        elif field.name == "callbacks":
            lines += ["", f"callbacks: {help_of['callbacks']}"]
            for name, cls in CALLBACKS.items():
                lines += ["", f"callbacks: (name: {name})", f"  {_summary(cls)}", *_describe_fields(cls)]
        else:
            lines += _describe_section(field.name, type(value))
    return "\n".join(lines) + "\n"


def _describe_section(path: str, cls: type) -> list[str]:
    """Returns the lines that describe a section, and the sections in it after its own keys."""
    hints = get_type_hints(cls)
    inner = {name: hint for name, hint in hints.items() if isinstance(hint, type) and dataclasses.is_dataclass(hint)}
    by_key = {f"{name}.<pattern>": options_by_key(hint) for name, hint in hints.items()}
    inner |= {name: options for name, options in by_key.items() if options is not None}
    lines = ["", f"{path}: {_summary(cls)}", *_describe_fields(cls)]
    return lines + [line for name, hint in inner.items() for line in _describe_section(f"{path}.{name}", hint)]


def _summary(cls: type) -> str:
    """Returns the first line of a class's docstring."""
    return (cls.__doc__ or "").strip().splitlines()[0]


def _describe_fields(cls: type) -> Iterator[str]:
    """Yields the lines that describe the fields of a dataclass."""
    hints, help_of = get_type_hints(cls, include_extras=True), field_help(cls)
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]):
            continue  # a section of its own
        given = f"  {field.name}: {_default(field)}" if has_default(field) else f"  {field.name}:"
        yield f"{given:<34}  ({describe(hints[field.name])})"
        yield from textwrap.wrap(help_of.get(field.name, ""), 108, initial_indent=" " * 6, subsequent_indent=" " * 6)


def _default(field: dataclasses.Field) -> str:
    value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    text = yaml.dump(_plain(value), Dumper=_Dumper, default_flow_style=True, width=1000).strip()
    return text.removesuffix("...").strip()


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


class _Dumper(yaml.SafeDumper):
    """Quotes text that the reader of this package, or any other of YAML 1.1, would take for something else.

    Lists stand on one line.
    """

    yaml_implicit_resolvers = {**yaml.SafeDumper.yaml_implicit_resolvers, None: SCALARS}  # noqa: RUF012  (PyYAML's)

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.SequenceNode:
        return super().represent_sequence(tag, sequence, flow_style=True)

    def ignore_aliases(self, data: Any) -> bool:
        return True
