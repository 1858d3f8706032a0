"""Arrays of a file that the transformer computes, or has under another name: they must agree with it.

    lm_head.weight with a tied head         the embedding table
    rotary_emb.inv_freq of an old Llama     the rotary frequencies
    attn.bias of an old GPT-2               the causal mask
    attn.masked_bias of an old GPT-2        the score of a masked position

`transformers` 5 reads a different head although config.json says that it is tied; older versions drop it. So an array
that differs is an error, and not dropped.
"""

import re

import jax.numpy as jnp
import numpy as np

from ..transformer import slowing_of
from ..transformer_config import TransformerConfig

HEAD = "lm_head.weight"
FREQUENCIES = re.compile(r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
MASK = re.compile(r"(transformer\.)?h\.\d+\.attn\.bias")
MASKED_SCORE = re.compile(r"(transformer\.)?h\.\d+\.attn\.masked_bias")
MAX_MASKED_SCORE = -1e3
"""The exponential of a score of at most this is 0."""
ROWS = 4096
"""Rows of a table that are compared at once."""


def redundancy_problem(
    name: str, array: np.ndarray, model_type: str, config: TransformerConfig, table_VD: np.ndarray | None
) -> str:
    """Returns the problem of an array that is not a parameter of the transformer, or "".

    Args:
        name: The name in the file.
        array: Its values, usually a memory map; read only if the transformer has them in another form.
        model_type: The family.
        config: The transformer.
        table_VD: The embedding table; None if it is missing or invalid.
    """
    if name == HEAD and config.tied:
        if table_VD is None or _has_equal_rows(array, table_VD):
            return ""
        return (
            f"{name} differs from the embedding table, but tie_word_embeddings (or its default) is true, so that the "
            "table would be used as the head. Set tie_word_embeddings to false to use the array, or remove the array."
        )
    if model_type == "gpt2" and MASK.fullmatch(name):
        return "" if _is_causal(array) else f"{name} is not a causal mask, which the transformer applies. Remove it."
    if model_type == "gpt2" and MASKED_SCORE.fullmatch(name):
        if array.size and np.asarray(array, np.float64).max() <= MAX_MASKED_SCORE:
            return ""
        return f"{name} is {np.asarray(array).tolist()}, but masked positions have no weight. Remove it."
    if model_type != "gpt2" and FREQUENCIES.fullmatch(name):
        if _has_frequencies(array, config):
            return ""
        return (
            f"{name} differs from the rotary frequencies that config.json requires. Correct rope_theta, or remove it."
        )
    return f"{name} is not an array of a {model_type} of these sizes."


def _has_equal_rows(array: np.ndarray, table: np.ndarray) -> bool:
    if array.shape != table.shape:
        return False
    for start in range(0, len(table), ROWS):
        rows = slice(start, start + ROWS)
        if not np.array_equal(np.asarray(array[rows]), np.asarray(table[rows])):
            return False
    return True


def _is_causal(mask: np.ndarray) -> bool:
    size = mask.shape[-1] if mask.ndim else 0
    if mask.size != size**2:
        return False
    return np.array_equal(np.asarray(mask).reshape(size, size) != 0, np.tri(size, dtype=bool))


def _has_frequencies(array: np.ndarray, config: TransformerConfig) -> bool:
    """Returns True for the frequencies of the transformer, as they are or before they are slowed."""
    half = config.head_size // 2
    if array.shape != (half,):
        return False
    frequency_k = config.rope_base ** (-np.arange(half) / half)
    slowing = slowing_of(config)
    slowed_k = frequency_k if slowing is None else np.asarray(slowing.apply(jnp.asarray(frequency_k)))
    stored_k = np.asarray(array, np.float64)
    rounding = 1e-5 if array.dtype.itemsize >= 4 else 1e-2
    return any(np.allclose(stored_k, each_k, rtol=rounding, atol=1e-6) for each_k in (frequency_k, slowed_k))
