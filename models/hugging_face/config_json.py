"""config.json of Hugging Face: conversion to and from the transformer's options.

Missing fields have the default of `transformers`. A feature that the transformer does not support is an error that
names it, because ignoring it would change the numbers.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ConfigDict, ValidationError

from ...mesh.errors import UserError
from ..transformer_config import TransformerConfig

NAME = "config.json"
Size = Annotated[int, Ge(1), Lt(2**31)] | None
Number = Annotated[float, Gt(0), Lt(3e38)] | None
Required = Annotated[int, Ge(1), Lt(2**31)]
Flag = bool | None


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


class LlamaJson(BaseModel):
    """The fields of a Llama or a Qwen with the values that the transformer supports."""

    model_config = ConfigDict(strict=True)

    vocab_size: Required
    hidden_size: Required
    intermediate_size: Required
    num_hidden_layers: Required
    num_attention_heads: Required
    num_key_value_heads: Size = None
    head_dim: Size = None
    max_position_embeddings: Size = None
    rms_norm_eps: Number = None
    rope_theta: Number = None
    rope_parameters: RopeJson | None = None
    rope_scaling: RopeJson | None = None
    attention_bias: Flag = None
    mlp_bias: Flag = None
    tie_word_embeddings: Flag = None
    hidden_act: Literal["silu"] | None = None
    partial_rotary_factor: Annotated[float, Ge(1), Le(1)] | None = None
    use_sliding_window: Literal[False] | None = None
    layer_types: list[Literal["full_attention"]] | None = None
    quantization_config: None = None


class GPT2Json(BaseModel):
    """The fields of a GPT-2 with the values that the transformer supports."""

    model_config = ConfigDict(strict=True)

    vocab_size: Required
    n_embd: Required
    n_layer: Required
    n_head: Required
    n_positions: Required
    n_inner: Size = None
    layer_norm_epsilon: Number = None
    tie_word_embeddings: Flag = None
    activation_function: Literal["gelu_new", "gelu_pytorch_tanh"] | None = None
    scale_attn_weights: Literal[True] | None = None
    scale_attn_by_inverse_layer_idx: Literal[False] | None = None
    add_cross_attention: Literal[False] | None = None
    quantization_config: None = None


AnyJson = TypeVar("AnyJson", bound=BaseModel)


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


def _parse(fields: type[AnyJson], content: Mapping[str, Any]) -> AnyJson:
    """Checks the fields of a family; raises a UserError with all problems."""
    try:
        return fields.model_validate(content)
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, each['loc']))}: {each['msg']}"
            + ("." if each["type"] == "missing" else f", got {each['input']!r:.80}.")
            for each in error.errors()
        ]
        first = f"{NAME} has fields that are invalid, or with values that the transformer does not support:"
        raise UserError("\n  ".join([first, *problems])) from None


def llama_options(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a Llama."""
    given = _parse(LlamaJson, content)
    bias = "all" if given.attention_bias else "none"
    return {**_as_llama(given), "attention_bias": bias, "mlp_bias": bool(given.mlp_bias)}


def qwen2_options(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a Qwen2: query, key and value have biases."""
    return {**_as_llama(_parse(LlamaJson, content)), "attention_bias": "inputs"}


def qwen3_options(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a Qwen3: heads of query and key have norms, and are 128 wide by default."""
    given = _parse(LlamaJson, content)
    bias = "all" if given.attention_bias else "none"
    return {**_as_llama(given), "head_width": given.head_dim or 128, "attention_bias": bias, "head_norm": True}


def gpt2_options(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a GPT-2."""
    given = _parse(GPT2Json, content)
    return {
        "vocabulary": given.vocab_size,
        "width": given.n_embd,
        "layers": given.n_layer,
        "heads": given.n_head,
        "length": given.n_positions,
        "max_length": given.n_positions,
        "mlp_width": given.n_inner or 4 * given.n_embd,
        "norm_epsilon": given.layer_norm_epsilon or 1e-5,
        "tied": given.tie_word_embeddings is not False,
        "norm": "layer",
        "positions": "learned",
        "mlp": "gelu",
        "mlp_bias": True,
        "attention_bias": "all",
    }


def _as_llama(given: LlamaJson) -> dict[str, Any]:
    return {
        "vocabulary": given.vocab_size,
        "width": given.hidden_size,
        "layers": given.num_hidden_layers,
        "heads": given.num_attention_heads,
        "length": given.max_position_embeddings or 0,
        "kv_heads": given.num_key_value_heads or given.num_attention_heads,
        "head_width": given.head_dim or given.hidden_size // given.num_attention_heads,
        "mlp_width": given.intermediate_size,
        "norm_epsilon": given.rms_norm_eps or 1e-6,
        "tied": bool(given.tie_word_embeddings),
        **_rotary_options(given),
    }


def _rotary_options(given: LlamaJson) -> dict[str, Any]:
    """Returns the options of rotary frequencies: `rope_parameters`, or those of older files."""
    rope = given.rope_parameters or given.rope_scaling or RopeJson()
    kind = rope.rope_type or rope.type or "default"
    options: dict[str, Any] = {"rope_base": rope.rope_theta or given.rope_theta or 10000.0}
    if kind != "default":
        options["rope_factor"] = rope.factor
    if kind == "llama3":
        options["rope_trained_length"] = rope.original_max_position_embeddings
        options["rope_slow_turns"], options["rope_fast_turns"] = rope.low_freq_factor, rope.high_freq_factor
    if None in options.values():
        raise UserError(
            f"{NAME}: rotary positions of type {kind!r} need factor, and those of type 'llama3' also low_freq_factor, "
            f"high_freq_factor and original_max_position_embeddings, got {rope.model_dump(exclude_none=True)}."
        )
    return options


def llama_sizes(config: TransformerConfig) -> dict[str, Any]:
    """Returns the content of config.json of a Llama or a Qwen."""
    content: dict[str, Any] = {
        "vocab_size": config.vocabulary,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_epsilon,
        "max_position_embeddings": config.length,
        "rope_theta": config.rope_base,
        "tie_word_embeddings": config.tied,
        "attention_bias": config.attention_bias == "all",
        "mlp_bias": config.mlp_bias,
    }
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


def gpt2_sizes(config: TransformerConfig) -> dict[str, Any]:
    """Returns the content of config.json of a GPT-2."""
    return {
        "vocab_size": config.vocabulary,
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": config.mlp_size,
        "n_positions": config.position_rows,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": config.norm_epsilon,
        "tie_word_embeddings": config.tied,
    }
