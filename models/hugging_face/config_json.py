"""config.json of Hugging Face: conversion to and from the transformer's options.

Each field of a class below is declared once, for both directions: it has the name of the transformer's option, and its
alias is the name in the file. Missing fields have the default of `transformers`. Every key of a file is read, compared
with the others, or known to have no effect on the logits (`keys_without_effect`). Any other key, and any value that the
transformer does not support, is an error that names it, because ignoring it would change the numbers.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from annotated_types import Ge, Gt, Le, Lt, MaxLen
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from ...mesh.errors import UserError, did_you_mean, hub_hint, raise_problems
from ..transformer_config import TransformerConfig
from .keys_without_effect import has_no_effect

NAME = "config.json"
Size = Annotated[int, Ge(1), Lt(2**31)] | None
Number = Annotated[float, Gt(0), Lt(3e38)] | None
One = Annotated[float, Ge(1), Le(1)] | None
Required = Annotated[int, Ge(1), Lt(2**31)]
Flag = bool | None


class ModelJson(BaseModel):
    """The fields of a family with the values that the transformer supports; None is a missing field.

    Attributes:
        NULL_IS_MISSING: Keys for which null is the same as no key, in `transformers` too.
    """

    model_config = ConfigDict(strict=True)
    NULL_IS_MISSING: ClassVar[frozenset[str]] = frozenset()

    tied: Flag = Field(None, alias="tie_word_embeddings")
    add_cross_attention: Literal[False] | None = None
    is_causal: Literal[True] | None = None
    is_encoder_decoder: Literal[False] | None = None
    per_layer_config: None = None
    pruned_heads: Annotated[dict[str, Any], MaxLen(0)] | None = None
    quantization_config: None = None

    @classmethod
    def keys(cls) -> set[str]:
        """Returns the keys of config.json that are read or compared."""
        return {field.alias or name for name, field in cls.model_fields.items()}

    @classmethod
    def parse(cls, content: Mapping[str, Any], ignore_keys: Sequence[str] = ()) -> Self:
        """Checks the content of config.json.

        Args:
            content: The content.
            ignore_keys: Keys that are treated as missing.

        Raises:
            UserError: A key is unknown, or a value is invalid or unsupported, or contradicts another; all at once. Or a
                key to ignore is not in the file.
        """
        missing = [key for key in ignore_keys if key not in content]
        if missing:
            raise UserError(f"ignore_keys names {missing[0]!r}, which {NAME} does not have. Remove it there.")
        considered = {key: value for key, value in content.items() if key not in ignore_keys}
        problems = [*cls._unknown_keys(considered), *cls._nulls(considered)]
        heading = f"{NAME} has fields that are invalid, or with values that the transformer does not support:"
        try:
            parsed = cls.model_validate(considered)
        except ValidationError as error:
            problems = [*map(_format_problem, error.errors()), *problems]
            raise UserError("\n  ".join([heading, *problems])) from None
        raise_problems([*problems, *parsed.contradictions()], heading)
        return parsed

    @classmethod
    def _unknown_keys(cls, content: Mapping[str, Any]) -> Iterator[str]:
        known = cls.keys()
        for key, value in content.items():
            if key in known or has_no_effect(key) or value is None:
                continue
            yield (
                f"{key} is unknown and may change the logits, got {value!r:.80}.{did_you_mean(key, known)} "
                "If it does not change them, name it in ignore_keys (model.ignore_keys)."
            )

    @classmethod
    def _nulls(cls, content: Mapping[str, Any]) -> Iterator[str]:
        """Yields the keys with null, which `transformers` takes for false or rejects, not for the default."""
        for name, field in cls.model_fields.items():
            key = field.alias or name
            default_is_none = field.annotation is type(None)
            if field.is_required() or default_is_none or key in cls.NULL_IS_MISSING:
                continue
            if key in content and content[key] is None:
                yield f"{key} must not be null. Remove the key to get its default."

    def contradictions(self) -> Iterator[str]:
        """Yields the keys that contradict each other."""
        yield from ()

    def options(self) -> dict[str, Any]:
        """Returns the options of the transformer that the file has."""
        return {name: value for name, value in self if value is not None and hasattr(TransformerConfig, name)}

    @classmethod
    def content(cls, config: TransformerConfig) -> dict[str, Any]:
        """Returns the content of config.json; fields that are not options have their default."""
        longest = max(config.max_length, config.length)
        options = {**asdict(with_sizes(config)), "max_length": config.position_rows or longest}
        content = {field.alias or name: options.get(name, field.default) for name, field in cls.model_fields.items()}
        return {name: value for name, value in content.items() if value is not None}


def _format_problem(error: ErrorDetails) -> str:
    key = ".".join(map(str, error["loc"]))
    if error["type"] == "missing":
        return f"{key}: {error['msg']}."
    if error["type"] == "extra_forbidden":
        return f"{key} is not supported, got {error['input']!r:.80}."
    return f"{key}: {error['msg']}, got {error['input']!r:.80}."


class RopeJson(BaseModel):
    """The fields of rotary positions; None is a missing field or null."""

    model_config = ConfigDict(strict=True, extra="forbid")

    rope_type: Literal["default", "linear", "llama3"] | None = None
    type: Literal["default", "linear", "llama3"] | None = None
    rope_theta: Number = None
    factor: Number = None
    low_freq_factor: Number = None
    high_freq_factor: Number = None
    original_max_position_embeddings: Size = None
    partial_rotary_factor: One = None

    @property
    def kind(self) -> str:
        """The type of the rotary positions."""
        return self.rope_type or self.type or "default"

    def given(self) -> dict[str, Any]:
        """Returns the fields that are not null."""
        return self.model_dump(exclude_none=True)

    def problems(self, key: str) -> Iterator[str]:
        """Yields the fields that contradict each other, are missing, or are not used by this type.

        Args:
            key: The key of config.json with these fields.
        """
        if self.rope_type and self.type and self.rope_type != self.type:
            yield f"{key}.rope_type={self.rope_type!r} contradicts {key}.type={self.type!r}. Remove the wrong one."
            return
        if self.rope_theta is None and "rope_theta" in self.model_fields_set:
            yield f"{key}.rope_theta must not be null. Remove the key to get its default."
        scaling = {name: value for name, value in self.given().items() if name in LLAMA3_FIELDS}
        needed = ROPE_FIELDS[self.kind]
        if any(name not in scaling for name in needed):
            yield (
                f"{key}: rotary positions of type {self.kind!r} need factor, and those of type 'llama3' also "
                f"low_freq_factor, high_freq_factor and original_max_position_embeddings, got {self.given()}."
            )
        for name, value in scaling.items():
            if name not in needed:
                yield (
                    f"{key}.{name}={value} is not used by rotary positions of type {self.kind!r}. Remove it, or "
                    f"correct {key}.rope_type."
                )

    def options(self) -> dict[str, Any]:
        """Returns the options of the transformer."""
        options: dict[str, Any] = {} if self.rope_theta is None else {"rope_base": self.rope_theta}
        if self.kind != "default":
            options["rope_factor"] = self.factor
        if self.kind == "llama3":
            options["rope_trained_length"] = self.original_max_position_embeddings
            options["rope_slow_turns"] = self.low_freq_factor
            options["rope_fast_turns"] = self.high_freq_factor
        return options


LLAMA3_FIELDS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
ROPE_FIELDS: Mapping[str, tuple[str, ...]] = {"default": (), "linear": ("factor",), "llama3": LLAMA3_FIELDS}
"""Type of rotary positions -> the fields that it needs, and uses beside the base."""


class LlamaJson(ModelJson):
    """The fields of a Llama or a Qwen3."""

    NULL_IS_MISSING: ClassVar[frozenset[str]] = frozenset(
        {
            "head_dim",
            "is_causal",
            "layer_types",
            "max_position_embeddings",
            "num_key_value_heads",
            "original_max_position_embeddings",
            "partial_rotary_factor",
            "pruned_heads",
            "rope_interleaved",
            "rope_parameters",
            "rope_scaling",
            "sliding_window",
            "use_mrope",
        }
    )

    vocabulary: Required = Field(alias="vocab_size")
    width: Required = Field(alias="hidden_size")
    mlp_width: Required = Field(alias="intermediate_size")
    layers: Required = Field(alias="num_hidden_layers")
    heads: Required = Field(alias="num_attention_heads")
    kv_heads: Size = Field(None, alias="num_key_value_heads")
    head_width: Size = Field(None, alias="head_dim")
    max_length: Size = Field(None, alias="max_position_embeddings")
    norm_epsilon: Number = Field(None, alias="rms_norm_eps")
    rope_base: Number = Field(None, alias="rope_theta")
    rope_parameters: RopeJson | None = None
    rope_scaling: RopeJson | None = None
    trained_length: Size = Field(None, alias="original_max_position_embeddings")
    partial_rotary_factor: One = None
    rope_interleaved: Literal[False] | None = None
    use_mrope: Literal[False] | None = None
    has_attention_bias: Flag = Field(None, alias="attention_bias")
    mlp_bias: Flag = None
    hidden_act: Literal["silu"] | None = "silu"
    use_sliding_window: Literal[False] | None = None
    sliding_window: int | None = None
    max_window_layers: int | None = None
    layer_types: list[Literal["full_attention"]] | None = None

    @property
    def ropes(self) -> dict[str, RopeJson]:
        """The places of rotary positions that are not empty, by key."""
        places = {"rope_scaling": self.rope_scaling, "rope_parameters": self.rope_parameters}
        return {key: rope for key, rope in places.items() if rope is not None and rope.model_fields_set}

    def contradictions(self) -> Iterator[str]:
        """Yields the keys of rotary positions that contradict each other."""
        for key, rope in self.ropes.items():
            yield from rope.problems(key)
            for name, value in (
                ("rope_theta", self.rope_base),
                ("original_max_position_embeddings", self.trained_length),
            ):
                inner = getattr(rope, name)
                if value is not None and inner is not None and inner != value:
                    yield f"{name}={value} contradicts {key}.{name}={inner}. Remove the wrong one."
        if self.trained_length is not None and not any(rope.kind == "llama3" for rope in self.ropes.values()):
            yield (
                f"original_max_position_embeddings={self.trained_length} is only used by rotary positions of type "
                "'llama3'. Remove it."
            )
        options = [self._rope_options(rope) for rope in self.ropes.values()]
        if len(options) == 2 and options[0] != options[1]:
            shown = " contradicts ".join(f"{key}={rope.given()}" for key, rope in self.ropes.items())
            yield f"{shown}. Remove the wrong one: programs differ in which of them counts."

    def _rope_options(self, rope: RopeJson) -> dict[str, Any]:
        base = {} if self.rope_base is None else {"rope_base": self.rope_base}
        return {**base, **rope.options()}

    def options(self) -> dict[str, Any]:
        """Returns the options of the transformer; those of rotary positions are in `rope_parameters` in new files."""
        rope = next(iter(self.ropes.values()), RopeJson())
        bias = "all" if self.has_attention_bias else "none"
        return {**super().options(), "attention_bias": bias, **self._rope_options(rope)}

    @classmethod
    def content(cls, config: TransformerConfig) -> dict[str, Any]:
        """Returns the content of config.json."""
        content = {**super().content(config), "attention_bias": config.attention_bias == "all"}
        if config.rope_factor != 1:
            content["rope_scaling"] = {"rope_type": "linear", "factor": config.rope_factor}
        if config.rope_factor != 1 and config.rope_trained_length:
            content["rope_scaling"] |= {
                "rope_type": "llama3",
                "low_freq_factor": config.rope_slow_turns,
                "high_freq_factor": config.rope_fast_turns,
                "original_max_position_embeddings": config.rope_trained_length,
            }
        return content


class Qwen2Json(LlamaJson):
    """The fields of a Qwen2, whose query, key and value always have biases, and no other matrix has."""

    def options(self) -> dict[str, Any]:
        """Returns the options of the transformer; as in `transformers`, `attention_bias` is none of them."""
        options = super().options()
        del options["attention_bias"]
        return options

    @classmethod
    def content(cls, config: TransformerConfig) -> dict[str, Any]:
        """Returns the content of config.json."""
        content = super().content(config)
        return {key: value for key, value in content.items() if key not in ("attention_bias", "mlp_bias")}


class GPT2Json(ModelJson):
    """The fields of a GPT-2."""

    NULL_IS_MISSING: ClassVar[frozenset[str]] = frozenset({"is_causal", "n_inner", "pruned_heads"})

    vocabulary: Required = Field(alias="vocab_size")
    width: Required = Field(alias="n_embd")
    layers: Required = Field(alias="n_layer")
    heads: Required = Field(alias="n_head")
    max_length: Required = Field(alias="n_positions")
    mlp_width: Size = Field(None, alias="n_inner")
    norm_epsilon: Number = Field(None, alias="layer_norm_epsilon")
    activation_function: Literal["gelu_new", "gelu_pytorch_tanh"] | None = "gelu_new"
    scale_attn_weights: Literal[True] | None = None
    scale_attn_by_inverse_layer_idx: Literal[False] | None = None


def with_sizes(config: TransformerConfig) -> TransformerConfig:
    """Returns a config with the sizes that follow from others given by themselves."""
    return replace(config, kv_heads=config.num_kv_heads, head_width=config.head_size, mlp_width=config.mlp_size)


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the content of a directory's config.json.

    Raises:
        UserError: The file is missing or not a JSON object.
    """
    path = folder / NAME
    if not path.exists():
        what = f"{NAME} is missing" if folder.is_dir() else "the directory does not exist"
        hint = "" if folder.is_dir() else hub_hint(folder)
        raise UserError(f"{folder}: {what}. Give a directory written by `save_pretrained` or a download.{hint}")
    return read_object(path)


def read_object(path: Path) -> dict[str, Any]:
    """Returns the JSON object of a file.

    Raises:
        UserError: The file cannot be read, or has other content.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {str(error)[:200]}.") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} must be a JSON object, got a {type(content).__name__}.")
    return content
