"""config.json of Hugging Face: conversion to and from the transformer's options.

Each field of a class below is declared once, for both directions: it has the name of the transformer's option, and its
alias is the name in the file. Missing fields have the default of `transformers`. A feature that the transformer does
not support is an error that names it, because ignoring it would change the numbers.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...mesh.errors import UserError
from ..transformer_config import TransformerConfig

NAME = "config.json"
Size = Annotated[int, Ge(1), Lt(2**31)] | None
Number = Annotated[float, Gt(0), Lt(3e38)] | None
Required = Annotated[int, Ge(1), Lt(2**31)]
Flag = bool | None


class ModelJson(BaseModel):
    """The fields of a family with the values that the transformer supports; None is a missing field or null."""

    model_config = ConfigDict(strict=True)

    @classmethod
    def parse(cls, content: Mapping[str, Any]) -> Self:
        """Checks the content of config.json; raises a UserError with all problems."""
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            problems = [
                f"{'.'.join(map(str, each['loc']))}: {each['msg']}"
                + ("." if each["type"] == "missing" else f", got {each['input']!r:.80}.")
                for each in error.errors()
            ]
            first = f"{NAME} has fields that are invalid, or with values that the transformer does not support:"
            raise UserError("\n  ".join([first, *problems])) from None

    def options(self) -> dict[str, Any]:
        """Returns the options of the transformer that the file has."""
        return {name: value for name, value in self if value is not None and hasattr(TransformerConfig, name)}

    @classmethod
    def content(cls, config: TransformerConfig) -> dict[str, Any]:
        """Returns the content of config.json; fields that are not options have their default."""
        options = {**asdict(with_sizes(config)), "max_length": config.position_rows}
        content = {field.alias or name: options.get(name, field.default) for name, field in cls.model_fields.items()}
        return {name: value for name, value in content.items() if value is not None}


class RopeJson(BaseModel):
    """The fields of rotary positions; None is a missing field or null."""

    model_config = ConfigDict(strict=True)

    rope_type: Literal["default", "linear", "llama3"] | None = None
    type: Literal["default", "linear", "llama3"] | None = None
    rope_theta: Number = None
    factor: Number = None
    low_freq_factor: Number = None
    high_freq_factor: Number = None
    original_max_position_embeddings: Size = None


class LlamaJson(ModelJson):
    """The fields of a Llama or a Qwen."""

    vocabulary: Required = Field(alias="vocab_size")
    width: Required = Field(alias="hidden_size")
    mlp_width: Required = Field(alias="intermediate_size")
    layers: Required = Field(alias="num_hidden_layers")
    heads: Required = Field(alias="num_attention_heads")
    kv_heads: Size = Field(None, alias="num_key_value_heads")
    head_width: Size = Field(None, alias="head_dim")
    length: Size = Field(None, alias="max_position_embeddings")
    norm_epsilon: Number = Field(None, alias="rms_norm_eps")
    rope_base: Number = Field(None, alias="rope_theta")
    rope_parameters: RopeJson | None = None
    rope_scaling: RopeJson | None = None
    has_attention_bias: Flag = Field(None, alias="attention_bias")
    mlp_bias: Flag = None
    tied: Flag = Field(None, alias="tie_word_embeddings")
    hidden_act: Literal["silu"] | None = "silu"
    partial_rotary_factor: Annotated[float, Ge(1), Le(1)] | None = None
    use_sliding_window: Literal[False] | None = None
    layer_types: list[Literal["full_attention"]] | None = None
    quantization_config: None = None

    def options(self) -> dict[str, Any]:
        """Returns the options of the transformer; those of rotary positions are in `rope_parameters` in new files."""
        rope = self.rope_parameters or self.rope_scaling or RopeJson()
        kind = rope.rope_type or rope.type or "default"
        scaling: dict[str, Any] = {} if kind == "default" else {"rope_factor": rope.factor}
        if kind == "llama3":
            scaling["rope_trained_length"] = rope.original_max_position_embeddings
            scaling["rope_slow_turns"], scaling["rope_fast_turns"] = rope.low_freq_factor, rope.high_freq_factor
        if None in scaling.values():
            raise UserError(
                f"{NAME}: rotary positions of type {kind!r} need factor, and those of type 'llama3' also "
                "low_freq_factor, high_freq_factor and original_max_position_embeddings, got "
                f"{rope.model_dump(exclude_none=True)}."
            )
        if rope.rope_theta is not None:
            scaling["rope_base"] = rope.rope_theta
        return {**super().options(), "attention_bias": "all" if self.has_attention_bias else "none", **scaling}

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


class GPT2Json(ModelJson):
    """The fields of a GPT-2."""

    vocabulary: Required = Field(alias="vocab_size")
    width: Required = Field(alias="n_embd")
    layers: Required = Field(alias="n_layer")
    heads: Required = Field(alias="n_head")
    max_length: Required = Field(alias="n_positions")
    mlp_width: Size = Field(None, alias="n_inner")
    norm_epsilon: Number = Field(None, alias="layer_norm_epsilon")
    tied: Flag = Field(None, alias="tie_word_embeddings")
    activation_function: Literal["gelu_new", "gelu_pytorch_tanh"] | None = "gelu_new"
    scale_attn_weights: Literal[True] | None = None
    scale_attn_by_inverse_layer_idx: Literal[False] | None = None
    add_cross_attention: Literal[False] | None = None
    quantization_config: None = None


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
        raise UserError(f"{folder}: {what}. Give a directory written by `save_pretrained` or a download.")
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
