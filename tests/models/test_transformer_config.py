"""What a config says: sizes, counts of parameters and of operations; options out of range."""

import jax
import numpy as np
import pytest
from spmdkit.configs.validation import to_dataclass
from spmdkit.models.hugging_face import HuggingFaceConfig
from spmdkit.models.lora import LoRAConfig
from spmdkit.models.mlp import MLPConfig
from spmdkit.models.moe import MoEConfig
from spmdkit.models.transformer import TransformerConfig, transformer
from support.small_transformers import SMALL, VARIANTS, make_batch


def test_number_of_parameters():
    D, H, G, K, F, V = 16, 4, 2, 6, 24, 23
    layer = D * H * K * 2 + D * G * K * 2 + 3 * D * F
    shapes = jax.eval_shape(transformer(SMALL).init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == 2 * (layer + 2 * D) + 2 * V * D + D
    assert SMALL.matmul_parameters == 2 * layer + V * D
    tied = jax.eval_shape(transformer(VARIANTS["multi-query, tied"]).init, jax.random.key(0))
    assert set(tied["head"]) == {"norm"}


def count_matmul_flops(jaxpr):
    """2 x multiply-adds of every product in a jaxpr, those inside loops as often as they run, of two ways the first."""
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            contracted = equation.params["dimension_numbers"][0][0]
            shape = equation.invars[0].aval.shape
            total += 2 * equation.outvars[0].aval.size * np.prod([shape[dim] for dim in contracted])
        values = [*equation.params.values(), *equation.params.get("branches", ())[:1]]
        inner = [getattr(value, "jaxpr", value) for value in values]
        inner = [value for value in inner if hasattr(value, "eqns")]
        total += sum(map(count_matmul_flops, inner)) * equation.params.get("length", 1)
    return total


@pytest.mark.slow_cases("config0")
@pytest.mark.parametrize("config", [SMALL, VARIANTS["multi-query, tied"], VARIANTS["multi-head, gpt"]])
def test_flops_are_those_of_the_products(config):
    """Up to 64 positions attention is one slice, the full square; backward has its two products once more."""
    model, batch = transformer(config), make_batch(config, rows=1)
    params = jax.eval_shape(model.init, jax.random.key(0))
    jaxpr = jax.make_jaxpr(jax.grad(lambda p: model.loss(p, batch, None)[0]))(params)
    repeated = 4 * config.layers * config.heads * config.head_size * config.length**2
    assert count_matmul_flops(jaxpr.jaxpr) - repeated == pytest.approx(config.flops_per_row, rel=0.02)
    assert model.flops_per_row == config.flops_per_row


def test_worked_out_sizes():
    config = TransformerConfig(width=128, heads=4)
    assert (config.num_kv_heads, config.head_size, config.mlp_size) == (4, 32, 384)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 4, "kv_heads": 3}, r"model.kv_heads=3 does not divide model.heads=4.*\[1, 2, 4\]"),
        ({"width": 30, "heads": 4}, "model.width=30 is not divisible by model.heads=4"),
        ({"width": 12, "heads": 4}, "a head is 3 wide.*must be even"),
        ({"rope_slow_turns": 4.0}, "model.rope_slow_turns=4.0 must be less than model.rope_fast_turns=4.0"),
        (
            {"positions": "learned", "max_length": 8, "length": 9},
            "model.max_length=8 is less than the 9 positions.*Set data.length to at most 8",
        ),
    ],
)
def test_rejects_options_that_contradict(options, message):
    with pytest.raises(ValueError, match=message):
        TransformerConfig(**options)


def test_reports_all_problems_at_once():
    with pytest.raises(ValueError) as error:
        TransformerConfig(heads=4, kv_heads=3, rope_slow_turns=5.0)
    assert [line.split("=")[0] for line in str(error.value).splitlines()] == ["model.rope_slow_turns", "model.kv_heads"]


@pytest.mark.parametrize(
    ("kind", "option", "invalid", "valid"),
    [
        *[(TransformerConfig, name, 0, 8) for name in ("layers", "width", "heads", "scan_unroll")],
        *[(TransformerConfig, name, -1, 0) for name in ("vocabulary", "length", "kv_heads", "mlp_width", "max_length")],
        (TransformerConfig, "dropout", 1.0, 0.0),
        (TransformerConfig, "rope_base", 1.0, 1.1),
        (TransformerConfig, "rope_factor", 0.9, 1.0),
        (TransformerConfig, "rope_slow_turns", 0.0, 0.1),
        (TransformerConfig, "norm_epsilon", 0.0, 1e-9),
        (TransformerConfig, "norm", "layr", "layer"),
        (MoEConfig, "experts", 0, 2),
        (MoEConfig, "top_k", 0, 1),
        *[(MoEConfig, name, -0.1, 0.0) for name in ("capacity_factor", "auxiliary_loss", "z_loss")],
        (MLPConfig, "features", -1, 0),
        (MLPConfig, "widths", [4, 0], []),
        (LoRAConfig, "rank", 0, 1),
        (LoRAConfig, "alpha", 0.0, 0.1),
        (HuggingFaceConfig, "dropout", -0.1, 0.5),
        (HuggingFaceConfig, "scan_unroll", 0, 1),
    ],
)
def test_rejects_values_out_of_range(kind, option, invalid, valid):
    """As configs validate them, by the annotations."""
    required = {"match": ["w"]} if kind is LoRAConfig else {}
    for value, is_valid in ((invalid, False), (valid, True)):
        problems = []
        to_dataclass(kind, {**required, option: value}, "model", problems)
        assert [problem.path for problem in problems] == [f"model.{option}"] * (not is_valid), value
