"""Small transformers: one for each choice that a config has, and two on meshes."""

from dataclasses import replace
from functools import cache

import jax
from spmdkit.models.moe import MoEConfig, moe
from spmdkit.models.transformer import TransformerConfig, transformer
from spmdkit.parallel import FSDPConfig, lay_out
from support import toy

SMALL = TransformerConfig(
    vocabulary=23, length=10, layers=2, width=16, heads=4, kv_heads=2, head_width=6, mlp_width=24, rope_base=100.0
)
VARIANTS = {
    "grouped": SMALL,
    "multi-query, tied": replace(SMALL, kv_heads=1, tied=True),
    "sliced, unrolled": replace(SMALL, length=70, scan_unroll=2),
    "qwen": replace(
        SMALL,
        **{"attention_bias": "all", "mlp_bias": True, "head_norm": True},
        **{"rope_factor": 4.0, "rope_trained_length": 9, "rope_slow_turns": 0.1, "rope_fast_turns": 1.0},
    ),
    "multi-head, gpt": replace(
        SMALL,
        kv_heads=0,
        norm="layer",
        positions="learned",
        max_length=12,
        mlp="gelu",
        mlp_bias=True,
        attention_bias="all",
        tied=True,
    ),
}


@cache
def first_params(config):
    return jax.device_get(jax.jit(transformer(config).init)(jax.random.key(0)))


def make_batch(config, rows=3):
    return toy.batch(0, rows, config.length, config.vocabulary)


SIZES = {"vocabulary": 32, "length": 16, "layers": 4, "width": 16, "heads": 4, "mlp_width": 32}
MODEL = transformer(TransformerConfig(**SIZES))
MIXTURE = moe(MoEConfig(**SIZES, experts=4, top_k=2))
FSDP = FSDPConfig(size=2, floor_bytes=64)


def layouts(devices, model=MODEL, **strategy):
    return lay_out(model, strategy, devices=toy.devices(devices))
