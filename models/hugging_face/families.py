"""The families of models: their options in config.json, and the array in the files for each parameter.

A parameter is stored under one name, or under one name for each block, with `{}` for the block's number.
torch's matrices of a linear layer are (out, in), ours (in, out): they are transposed. GPT-2's are (in, out) too, and
its query, key and value are thirds of the columns of one matrix.

Sources: the public checkpoints' own config.json and tensor names; Touvron et al. 2023 (Llama 2), Dubey et al. 2024
(Llama 3), Yang et al. 2024 (Qwen2), Yang et al. 2025 (Qwen3), Radford et al. 2019 (GPT-2).
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...mesh.errors import UserError, raise_problems
from ..moe import MoEConfig
from ..transformer_config import TransformerConfig
from .config_json import NAME, GPT2Json, LlamaJson, ModelJson, Qwen2Json, with_sizes


class Stored(NamedTuple):
    """The place of a parameter in the files.

    Attributes:
        name: The name of the array; `{}` stands for the number of the block.
        transposed: It is stored (out, in).
        part: (index, number of parts) of the columns of the array.
    """

    name: str
    transposed: bool = False
    part: tuple[int, int] = (0, 1)

    def shape(self, parameter: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the array in the files, for that of the parameter, or of one block of it."""
        whole = (*parameter[:-1], parameter[-1] * self.part[1])
        return whole[::-1] if self.transposed else whole


class Family(NamedTuple):
    """A family of models.

    Attributes:
        model_type: Its name in config.json.
        architecture: The class of `transformers` for a language model of it.
        fields: The fields of its config.json.
        defaults: Options of the transformer that have another default in `transformers`.
        fixed: Options of the transformer -> the values that the family supports.
        stored: Path of a parameter -> its place.
    """

    model_type: str
    architecture: str
    fields: type[ModelJson]
    defaults: Mapping[str, Any]
    fixed: Mapping[str, tuple[Any, ...]]
    stored: Mapping[str, Stored]

    def transformer(
        self, content: Mapping[str, Any], *, length: int = 0, ignore_keys: Sequence[str] = (), **options: Any
    ) -> TransformerConfig:
        """Returns the transformer of a config.json; arguments are those of `load`.

        Raises:
            UserError: See `ModelJson.parse`; or an option is one that models of this family do not have.
        """
        stated = self.fields.parse(content, ignore_keys).options()
        unsupported = [
            f"{NAME}: {name}={stated[name]} is not supported for model_type={self.model_type!r}, which always has "
            f"{name}={values[0]}."
            for name, values in self.fixed.items()
            if name in stated and stated[name] not in values
        ]
        raise_problems(unsupported)
        only = {name: values[0] for name, values in self.fixed.items() if len(values) == 1}
        merged = {**self.defaults, **stated, **only, **options}
        longest = merged.get("max_length", 0)
        return with_sizes(TransformerConfig(**{**merged, "length": length or longest}))


def _llama_names() -> dict[str, Stored]:
    layer = "model.layers.{}."
    linear = {"attention/query": "self_attn.q_proj", "attention/key": "self_attn.k_proj"}
    linear |= {"attention/value": "self_attn.v_proj", "attention/out": "self_attn.o_proj"}
    linear |= {f"mlp/{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    names = {
        "embed/tokens": Stored("model.embed_tokens.weight"),
        "head/norm": Stored("model.norm.weight"),
        "head/logits": Stored("lm_head.weight", transposed=True),
        "blocks/attention/norm": Stored(f"{layer}input_layernorm.weight"),
        "blocks/mlp/norm": Stored(f"{layer}post_attention_layernorm.weight"),
        "blocks/attention/query_norm": Stored(f"{layer}self_attn.q_norm.weight"),
        "blocks/attention/key_norm": Stored(f"{layer}self_attn.k_norm.weight"),
    }
    for path, name in linear.items():
        names[f"blocks/{path}"] = Stored(f"{layer}{name}.weight", transposed=True)
        names[f"blocks/{path}_bias"] = Stored(f"{layer}{name}.bias")
    return names


def _gpt2_names() -> dict[str, Stored]:
    layer = "transformer.h.{}."
    names = {
        "embed/tokens": Stored("transformer.wte.weight"),
        "embed/positions": Stored("transformer.wpe.weight"),
        "head/norm": Stored("transformer.ln_f.weight"),
        "head/norm_bias": Stored("transformer.ln_f.bias"),
        "head/logits": Stored("lm_head.weight", transposed=True),
    }
    linear = {"attention/out": "attn.c_proj", "mlp/up": "mlp.c_fc", "mlp/down": "mlp.c_proj"}
    for suffix, kind in (("", "weight"), ("_bias", "bias")):
        names[f"blocks/attention/norm{suffix}"] = Stored(f"{layer}ln_1.{kind}")
        names[f"blocks/mlp/norm{suffix}"] = Stored(f"{layer}ln_2.{kind}")
        for number, name in enumerate(("query", "key", "value")):
            names[f"blocks/attention/{name}{suffix}"] = Stored(f"{layer}attn.c_attn.{kind}", part=(number, 3))
        for path, name in linear.items():
            names[f"blocks/{path}{suffix}"] = Stored(f"{layer}{name}.{kind}")
    return names


def _as_llama(model_type: str, defaults: Mapping[str, Any] = {}, **fixed: Any) -> Family:
    defaults = {"norm_epsilon": 1e-6, **defaults}
    fixed = {"norm": ("rms",), "positions": ("rotary",), "mlp": ("swiglu",), "head_norm": (False,), **fixed}
    fields = Qwen2Json if model_type == "qwen2" else LlamaJson
    return Family(model_type, f"{model_type.capitalize()}ForCausalLM", fields, defaults, fixed, _llama_names())


BIASES = ("none", "all")
GPT2 = {
    "norm": ("layer",),
    "positions": ("learned",),
    "mlp": ("gelu",),
    "head_norm": (False,),
    "attention_bias": ("all",),
    "mlp_bias": (True,),
}
FAMILIES = {
    "llama": _as_llama("llama", attention_bias=BIASES, mlp_bias=(False, True)),
    "qwen2": _as_llama("qwen2", attention_bias=("inputs",), mlp_bias=(False,)),
    "qwen3": _as_llama("qwen3", {"head_width": 128}, attention_bias=BIASES, mlp_bias=(False,), head_norm=(True,)),
    "gpt2": Family("gpt2", "GPT2LMHeadModel", GPT2Json, {"tied": True}, GPT2, _gpt2_names()),
}
"""model_type -> the family."""


def family_of(config: TransformerConfig) -> Family:
    """Returns the family that a transformer can be written as.

    Raises:
        UserError: None supports its options; with the differences from each.
    """
    if isinstance(config, MoEConfig):
        raise UserError(
            "A mixture of experts cannot be written for Hugging Face: the supported families do not have its arrays."
        )
    lacking = {}
    for family in FAMILIES.values():
        wrong = [
            f"model.{name}={getattr(config, name)} ({' or '.join(map(str, wanted))})"
            for name, wanted in family.fixed.items()
            if getattr(config, name) not in wanted
        ]
        heads = config.num_kv_heads == config.heads and config.head_size * config.heads == config.width
        if family.model_type == "gpt2" and not heads:
            wrong.append("model.kv_heads and model.head_width (they must follow from model.heads and model.width)")
        if not wrong:
            return family
        lacking[family.model_type] = wrong
    lines = "\n".join(f"  {name}: {', '.join(wrong)}" for name, wrong in lacking.items())
    raise UserError(f"The options do not match any Hugging Face family. Differences from each:\n{lines}")


def without_prefix(name: str) -> str:
    """Returns the name of an array in the files of a model without its head."""
    return re.sub(r"^(model|transformer)\.", "", name)
