"""A config as text: the resolved YAML of a run, the reference of all keys, and the JSON schema for editors."""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from textwrap import wrap
from typing import Any, get_args, get_type_hints

import yaml
from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from ..models.catalog import MODELS
from ..models.lora import LoRAConfig
from ..parallel.options import show_number
from ..parallel.sharding.strategies import option_types
from ..training.callbacks.callback_catalog import CALLBACKS
from .checks import AUTO
from .key_names import sections
from .schema import Config, ModelCheck
from .secret_variables import redact_config
from .validation import BYTE_KEYS, BYTES, make_adapter
from .yaml_reader import SCALARS

TYPES = {"boolean": "true or false", "object": "a mapping (key: value)", "integer": "an integer"}
LIMITS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "less than"}
ITEMS = {"string": "strings", "integer": "integers", "number": "numbers", "object": "mappings"}
OWN_CODE = {"type": "string", "pattern": "^[^:]+:[^:]+$", "description": "Your own code as module:function."}


def resolved_yaml(config: Config) -> str:
    """Returns every key of a config with its value, except secrets; loading it gives an equal config."""
    return yaml.dump(as_plain(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def as_plain(config: Config) -> dict[str, Any]:
    """Returns a config as dicts, lists and scalars, with null in place of secrets."""
    return redact_config({name: to_jsonable_python(getattr(config, name)) for name in sections()})


def config_schema() -> dict[str, Any]:
    """Returns the JSON schema of a config, for `spmdkit schema`."""
    defaults, axes = Config(), option_types()
    classes = {name: type(getattr(defaults, name)) for name in sections() if is_dataclass(getattr(defaults, name))}
    model_classes = {name: options for name, (options, _) in MODELS.items()}
    every = [*classes.values(), *model_classes.values(), *axes.values(), *CALLBACKS.values(), ModelCheck, LoRAConfig]
    found, shared = TypeAdapter.json_schemas([(cls, "validation", make_adapter(cls)) for cls in every])
    definitions = shared["$defs"]
    for cls in every:
        for name, text in field_help(cls).items():
            definitions[cls.__name__]["properties"][name]["description"] = text
    every_field = [each for definition in definitions.values() for each in definition.get("properties", {}).items()]
    for name, field in every_field:
        if name.endswith(BYTE_KEYS) and field.get("type") == "integer":
            number = {key: field.pop(key) for key in ("type", "minimum") if key in field}
            field["anyOf"] = [number, {"type": "string", "pattern": f"^{BYTES.pattern}$"}]
    of = {cls: found[cls, "validation"] for cls in every}
    for_all = {**definitions["ModelCheck"]["properties"], "lora": of[LoRAConfig]}
    for name, cls in (*model_classes.items(), *CALLBACKS.items()):
        definition = definitions[cls.__name__]
        definition["properties"] = {"name": {"const": name}, **definition["properties"]}
        if name in MODELS:
            definition["properties"] |= for_all
        if name != "transformer":
            definition["required"] = ["name", *definition.get("required", ())]
    own = {"type": "object", "properties": {"name": OWN_CODE}, "required": ["name"]}
    sizes: dict[str, Any] = {name: {"anyOf": [{"type": "integer"}, of[cls]]} for name, cls in axes.items()}
    sizes[AUTO] = {"type": "object", "properties": {"size": {"const": -1}}, "additionalProperties": False}
    strategy = {"type": "object", "properties": sizes, "additionalProperties": False}
    callbacks = [{"enum": list(CALLBACKS)}, OWN_CODE, own, *(of[cls] for cls in CALLBACKS.values())]
    properties: dict[str, Any] = {
        **{name: of[cls] for name, cls in classes.items()},
        "model": {"anyOf": [{"type": "null"}, own, *(of[cls] for cls in model_classes.values())]},
        "strategy": {"anyOf": [{"enum": [*axes, AUTO]}, strategy]},
        "callbacks": {"type": ["array", "null"], "items": {"anyOf": callbacks}},
    }
    for name, text in field_help(Config).items():
        properties[name]["description"] = text
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "spmdkit config",
        "type": "object",
        "properties": {name: properties[name] for name in sections()},
        "additionalProperties": False,
        "$defs": definitions,
    }


@cache
def field_help(cls: type) -> dict[str, str]:
    """Returns field name -> description, on one line, for the documented fields of a dataclass and its bases."""
    bases = [base for base in reversed(cls.__mro__) if is_dataclass(base)]
    documented = [each for base in bases for each in _properties(base).items() if "description" in each[1]]
    return {name: " ".join(field["description"].split()) for name, field in documented}


def describe_config() -> str:
    """Returns all sections and keys with types, defaults and descriptions, for `spmdkit train --help-config`."""
    help_of, defaults = field_help(Config), Config()
    lines = ["Every key of a config, with its default. YAML files and key=value arguments set them."]
    for name in sections():
        value = getattr(defaults, name)
        if is_dataclass(value):
            lines += _describe_section(name, type(value))
            continue
        lines += ["", f"{name}: {help_of[name]}"]
        if name == "model":
            lines += [*_describe_fields(ModelCheck), *_describe_section("model.lora", LoRAConfig)]
            for model, (options, _) in sorted(MODELS.items()):
                lines += ["", f"model: (name: {model})", *_describe_fields(options)]
        elif name == "strategy":
            for axis, options in option_types().items():
                lines += _describe_section(f"strategy.{axis}", options)
        else:
            for callback, cls in CALLBACKS.items():
                lines += ["", f"callbacks: (name: {callback})", f"  {_summary(cls)}", *_describe_fields(cls)]
    return "\n".join(lines) + "\n"


def _describe_section(path: str, cls: type) -> list[str]:
    """Returns the lines of a section and, after its own keys, of its subsections."""
    lines = ["", f"{path}: {_summary(cls)}", *_describe_fields(cls)]
    for name, hint in get_type_hints(cls).items():
        options = (get_args(hint) or (None,))[-1]
        if isinstance(hint, type) and is_dataclass(hint):
            lines += _describe_section(f"{path}.{name}", hint)
        elif isinstance(options, type) and is_dataclass(options):
            lines += _describe_section(f"{path}.{name}.<pattern>", options)
    return lines


def _describe_fields(cls: type) -> Iterator[str]:
    """Yields the lines of the fields of a dataclass."""
    properties, help_of = _properties(cls), field_help(cls)
    for field in fields(cls):
        if not field.init or "$ref" in properties[field.name]:
            continue  # a subsection
        default = _default(field)
        given = f"  {field.name}:{f' {default}' if default else ''}"
        yield f"{given:<34}  ({describe_type(properties[field.name])})"
        yield from wrap(help_of.get(field.name, ""), 108, initial_indent=" " * 6, subsequent_indent=" " * 6)


def describe_type(schema: Mapping[str, Any]) -> str:
    """Returns a JSON schema in words: `an integer, at least 1`, `a list of strings`, `one of none, dots, full`."""
    if "anyOf" in schema:
        return " or ".join(map(describe_type, schema["anyOf"]))
    if "enum" in schema:
        return f"one of {', '.join(str(value) for value in schema['enum'] if value != '')}"
    kind = schema.get("type")
    if kind is None:
        return "any value"
    if kind == "array":
        items = schema.get("items", {})
        words = ITEMS.get("object" if "$ref" in items else items.get("type"))
        words = f"{len(schema['prefixItems'])} values" if "prefixItems" in schema else words
        return f"a list of {words}" if words else "a list"
    words = TYPES.get(kind, kind if kind == "null" else f"a {kind}")
    limits = {name: schema[name] for name in LIMITS if name in schema}
    if limits.get("exclusiveMinimum") == 0:
        words = f"a positive {kind}"
        del limits["exclusiveMinimum"]
    return words + "".join(f", {LIMITS[name]} {show_number(limit)}" for name, limit in limits.items())


def _properties(cls: type) -> dict[str, Any]:
    schema = make_adapter(cls).json_schema()
    return schema.get("properties") or schema["$defs"][cls.__name__]["properties"]


def _summary(cls: type) -> str:
    """Returns the first line of a class's docstring."""
    return (cls.__doc__ or "").strip().splitlines()[0]


def _default(field: Any) -> str:
    value = field.default if field.default_factory is MISSING else field.default_factory()
    if value is MISSING:
        return ""
    text = yaml.dump(to_jsonable_python(value), Dumper=_Dumper, default_flow_style=True, width=1000).strip()
    return text.removesuffix("...").strip()


class _Dumper(yaml.SafeDumper):
    """Quotes strings that readers of YAML 1.1 or 1.2 would read as another type. Writes lists on one line."""

    yaml_implicit_resolvers = {**yaml.SafeDumper.yaml_implicit_resolvers, None: SCALARS}  # noqa: RUF012  (PyYAML's)

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.SequenceNode:
        return super().represent_sequence(tag, sequence, flow_style=True)

    def ignore_aliases(self, data: Any) -> bool:
        return True
