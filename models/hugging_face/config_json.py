"""config.json of Hugging Face: conversion to and from the transformer's options.

Missing fields have the default of `transformers`. A feature that the transformer does not support is an error that
names it, because ignoring it would change the numbers.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...mesh.errors import UserError
from ..transformer_config import TransformerConfig

NAME = "config.json"
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "max_position_embeddings", "original_max_position_embeddings"),
    *("n_embd", "n_layer", "n_head", "n_inner", "n_positions"),
)
NUMBERS = ("rms_norm_eps", "layer_norm_epsilon", "rope_theta", "factor", "low_freq_factor", "high_freq_factor")
KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(SIZES, ("an integer from 1 to 2**31 - 1", lambda value: type(value) is int and 0 < value < 2**31)),
    **dict.fromkeys(NUMBERS, ("a number over 0", lambda value: type(value) in (int, float) and 0 < value < 3e38)),
    **dict.fromkeys(
        ("attention_bias", "mlp_bias", "tie_word_embeddings"), ("true or false", lambda value: type(value) is bool)
    ),
    **dict.fromkeys(("model_type", "rope_type", "type"), ("a string", lambda value: isinstance(value, str))),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), ("an object", lambda value: isinstance(value, dict))),
    "layer_types": ("a list", lambda value: isinstance(value, list)),
}
"""Field -> a description of its type, and the check of a value; null counts as missing."""


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the content of a directory's config.json, with the types of the fields checked.

    Raises:
        UserError: The file is missing or not a JSON object, or fields have other types: all fields at once.
    """
    path = folder / NAME
    if not path.exists():
        what = f"{NAME} is missing" if folder.is_dir() else "the directory does not exist"
        raise UserError(f"{folder}: {what}. Give a directory written by `save_pretrained` or a download.")
    content = read_object(path)
    problems = [*_type_problems(content)]
    if problems:
        raise UserError("\n  ".join([f"{path} has invalid fields:", *problems]))
    return content


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


def _type_problems(content: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for name, value in content.items():
        kind, is_valid = KINDS.get(name, ("", lambda value: True))
        if value is not None and not is_valid(value):
            yield f"{above}{name} must be {kind}, got {value!r:.80}."
        elif isinstance(value, dict) and name in KINDS:
            yield from _type_problems(value, f"{name}.")


def llama_options(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a Llama."""
    return {
        **_as_llama(content, {"hidden_act": "silu", "partial_rotary_factor": 1.0}),
        "attention_bias": "all" if content.get("attention_bias") else "none",
        "mlp_bias": bool(content.get("mlp_bias", False)),
    }


def qwen2_options(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a Qwen2: query, key and value have biases."""
    return {**_as_llama(content, {"hidden_act": "silu", "use_sliding_window": False}), "attention_bias": "inputs"}


def qwen3_options(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a Qwen3: heads of query and key have norms."""
    return {
        **_as_llama({"head_dim": 128, **content}, {"hidden_act": "silu", "use_sliding_window": False}),
        "attention_bias": "all" if content.get("attention_bias") else "none",
        "head_norm": True,
    }


def gpt2_options(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a GPT-2."""
    _check_supported(
        content,
        {
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
            "quantization_config": None,
        },
    )
    if content.get("activation_function", "gelu_new") not in ("gelu_new", "gelu_pytorch_tanh"):
        raise UserError(
            f"{NAME}: activation_function={content['activation_function']!r}; the transformer supports only the tanh "
            "approximation of GELU (gelu_new)."
        )
    vocabulary, width, layers, heads, rows = _sizes(content, "vocab_size", "n_embd", "n_layer", "n_head", "n_positions")
    return {
        "vocabulary": vocabulary,
        "width": width,
        "layers": layers,
        "heads": heads,
        "max_length": rows,
        "mlp_width": content.get("n_inner") or 4 * width,
        "norm_epsilon": content.get("layer_norm_epsilon") or 1e-5,
        "tied": bool(content.get("tie_word_embeddings", True)),
        "norm": "layer",
        "positions": "learned",
        "mlp": "gelu",
        "mlp_bias": True,
        "attention_bias": "all",
    }


def _as_llama(content: Mapping[str, Any], only: Mapping[str, Any]) -> dict[str, Any]:
    _check_supported(content, {**only, "quantization_config": None})
    sliding = [kind for kind in content.get("layer_types") or () if kind != "full_attention"]
    if sliding:
        raise UserError(f"{NAME}: layer_types has {sliding[0]!r}; the transformer supports only full_attention.")
    vocabulary, width, layers, heads, inner = _sizes(
        content, "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"
    )
    return {
        "vocabulary": vocabulary,
        "width": width,
        "layers": layers,
        "heads": heads,
        "kv_heads": content.get("num_key_value_heads") or heads,
        "head_width": content.get("head_dim") or width // heads,
        "mlp_width": inner,
        "norm_epsilon": content.get("rms_norm_eps") or 1e-6,
        "tied": bool(content.get("tie_word_embeddings", False)),
        **_rotary_options(content),
    }


def _rotary_options(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of rotary frequencies: `rope_parameters`, or `rope_theta` and `rope_scaling` "
    "of older files."""
    rope = content.get("rope_parameters") or content.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    options = {"rope_base": float(rope.get("rope_theta") or content.get("rope_theta") or 10000.0)}
    if kind == "default":
        return options
    if kind == "linear":
        return {**options, "rope_factor": _required(rope, "factor", kind)}
    if kind == "llama3":
        return {
            **options,
            "rope_factor": _required(rope, "factor", kind),
            "rope_trained_length": int(_required(rope, "original_max_position_embeddings", kind)),
            "rope_slow_turns": _required(rope, "low_freq_factor", kind),
            "rope_fast_turns": _required(rope, "high_freq_factor", kind),
        }
    raise UserError(
        f"{NAME}: unsupported rope_type={kind!r}; the transformer supports default, linear and llama3. For a model "
        "that was trained with the default type, you can remove this field from the file."
    )


def _required(rope: Mapping[str, Any], name: str, kind: str) -> float:
    if rope.get(name) is None:
        raise UserError(f"{NAME}: rotary positions of type {kind!r} need {name}, which is missing.")
    return float(rope[name])


def _sizes(content: Mapping[str, Any], *names: str) -> list[int]:
    missing = [name for name in names if content.get(name) is None]
    if missing:
        given = ", ".join(f"{name}=None" for name in missing)
        raise UserError(f"{NAME}: required integers of at least 1, got {given}.")
    return [content[name] for name in names]


def _check_supported(content: Mapping[str, Any], only: Mapping[str, Any]) -> None:
    """Raises a UserError if options have other values than the transformer supports."""
    wrong = [name for name, value in only.items() if content.get(name, value) not in (value, None)]
    if wrong:
        given = "; ".join(f"{name}={content[name]!r}, the transformer supports only {only[name]!r}" for name in wrong)
        raise UserError(f"{NAME}: {given}.")


def llama_sizes(config: TransformerConfig) -> dict[str, Any]:
    """Returns the content of config.json of a Llama or a Qwen."""
    content = {
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
        content["rope_scaling"] = _scaling(config)
    return content


def _scaling(config: TransformerConfig) -> dict[str, Any]:
    if not config.rope_trained_length:
        return {"rope_type": "linear", "factor": config.rope_factor}
    return {
        "rope_type": "llama3",
        "factor": config.rope_factor,
        "low_freq_factor": config.rope_slow_turns,
        "high_freq_factor": config.rope_fast_turns,
        "original_max_position_embeddings": config.rope_trained_length,
    }


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
