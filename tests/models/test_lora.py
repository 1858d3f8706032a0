"""Low-rank adapters: the model is its base with W + alpha / r * A B, written by hand here, and only A and B train."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from spmdkit.layouts.paths import leaves_with_paths
from spmdkit.models import MoEConfig, TransformerConfig, load_model, moe, transformer
from spmdkit.models.lora import LoRA, LoRAConfig, frozen_by_lora
from spmdkit.parallel import Model, build_step, census, lay_out
from spmdkit.parallel.model import ParallelContext
from spmdkit.parallel.sharding.default_layout import model_axes
from spmdkit.parallel.tensor import TensorConfig
from spmdkit.training.optimizing.optimizers import OptimizerConfig, make_optimizer
from support import toy

CONFIG = LoRAConfig(rank=3, alpha=6.0, match=("blocks/up", "head/.*"))
BASES = {"blocks": toy.BLOCK_MODEL, "plain": toy.PLAIN_MODEL}
ADAPTERS = {"blocks": ("blocks/lora/up", "head/lora/out"), "plain": ("lora/blocks/up", "lora/head/out")}

TWO_MATRICES = Model(
    init=lambda key: dict.fromkeys(("one", "two"), jnp.ones((32, 32), jnp.bfloat16)),
    loss=lambda params, batch, key: (jnp.zeros(()), jnp.ones(())),
)


def at(params, path):
    return dict(leaves_with_paths(params))[path]


def trained(kind):
    """Parameters of a model with adapters whose B is no longer zero."""
    return jax.tree.map(np.float64, toy.first_params(LoRA(BASES[kind], CONFIG).model))


def by_hand(kind, params):
    """The loss of the toy, its matrices merged by hand, as a function of (base parameters, the four adapters)."""
    up, out = ADAPTERS[kind]
    pairs = [[at(params, f"{path}/{name}") for name in ("a", "b")] for path in (up, out)]
    base = {
        "embed": {"table": at(params, "embed/table")},
        "blocks": {name: at(params, f"blocks/{name}") for name in ("up", "down", "scale")},
        "head": {"out": at(params, "head/out")},
    }

    def loss(base, pairs):
        (a_up, b_up), (a_out, b_out) = pairs
        merged = {
            "embed": base["embed"],
            "blocks": {**base["blocks"], "up": base["blocks"]["up"] + 2.0 * jnp.einsum("nir,nro->nio", a_up, b_up)},
            "head": {"out": base["head"]["out"] + 2.0 * a_out @ b_out},
        }
        return toy.BLOCK_MODEL.loss(merged, toy.batch(0), None)[0]

    return base, pairs, loss


def assert_close(found, expected):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12), found, expected)


def adapters_of(kind, tree):
    return [[at(tree, f"{path}/{name}") for name in ("a", "b")] for path in ADAPTERS[kind]]


@pytest.mark.slow_cases("blocks", "plain")
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("kind", BASES)
def test_value_and_gradient_are_those_of_the_merged_model(kind):
    params = trained(kind)
    base, pairs, loss = by_hand(kind, params)
    expected, gradients = jax.jit(jax.value_and_grad(loss, argnums=1))(base, pairs)
    model = LoRA(BASES[kind], CONFIG).model
    found, mine = jax.jit(jax.value_and_grad(lambda params: model.loss(params, toy.batch(0), None)[0]))(params)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert_close(adapters_of(kind, mine), gradients)
    others = {path for path, leaf in leaves_with_paths(mine) if leaf.any()}
    assert others == {f"{path}/{name}" for path in ADAPTERS[kind] for name in ("a", "b")}
    merged = LoRA(BASES[kind], CONFIG).merge(params)
    assert jax.tree.structure(merged) == jax.tree.structure(base)
    np.testing.assert_allclose(jax.jit(BASES[kind].loss)(merged, toy.batch(0), None)[0], expected, rtol=1e-12)
    np.testing.assert_array_equal(at(merged, "blocks/down"), at(params, "blocks/down"))


@pytest.mark.slow_cases("blocks")
@pytest.mark.parametrize("kind", BASES)
def test_it_starts_at_the_loss_of_its_base(kind):
    base, key = BASES[kind], jax.random.key(3)
    model = LoRA(base, CONFIG).model
    params, own = model.init(key), base.init(key)
    for path, leaf in leaves_with_paths(own):
        np.testing.assert_array_equal(at(params, path), leaf)
    assert jax.jit(model.loss)(params, toy.batch(0), None) == jax.jit(base.loss)(own, toy.batch(0), None)
    for (a, b), size in zip(adapters_of(kind, params), (toy.WIDTH, toy.WIDTH), strict=True):
        assert not b.any()
        assert 0.7 < float(jnp.std(a)) * size**0.5 < 1.3
    (blocks, _), _ = adapters_of(kind, params)
    assert len({np.asarray(each).tobytes() for each in blocks}) == toy.BLOCKS, "each block draws its own"


def test_each_matrix_has_its_own_adapter_and_is_rounded_once():
    lora = LoRA(TWO_MATRICES, LoRAConfig(rank=8, alpha=8.0, match=(".*",)))
    params = lora.model.init(jax.random.key(0))
    assert (at(params, "lora/one/a") != at(params, "lora/two/a")).all()
    params["lora"]["one"]["b"] = b = jax.random.normal(jax.random.key(1), (8, 32))
    expected = (1 + at(params, "lora/one/a") @ b).astype(jnp.bfloat16)
    np.testing.assert_array_equal(lora.merge(params)["one"], expected)


def test_rejects_parameters_outside_a_dict():
    base = Model(init=lambda key: (jnp.ones((4, 6)), jnp.ones(())), loss=lambda params, batch, key: (0.0, 1.0))
    with pytest.raises(ValueError, match="the parameters of the model must be a dict to contain adapters, got a tuple"):
        LoRA(base, LoRAConfig(rank=1, match=("0",)))


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-6), (np.float16, 2e-3)])
def test_merges_in_the_dtype_of_the_matrix(dtype, tolerance):
    own = {"up": np.random.default_rng(0).normal(size=(4, 6)).astype(dtype), "norm": np.ones(4, np.float32)}
    lora = LoRA(Model(init=lambda key: own, loss=lambda *_: (0.0, 1.0)), LoRAConfig(rank=2, alpha=1.0, match=("up",)))
    tree = lora.start(own, jax.random.key(0))
    pair = tree["lora"]["up"]
    pair["b"] = np.random.default_rng(1).normal(size=(2, 6)).astype(np.float32)
    found = lora.merge(tree)
    assert (found["up"].dtype, set(found)) == (dtype, {"up", "norm"})
    expected = own["up"] + 0.5 * np.asarray(pair["a"]) @ pair["b"]
    np.testing.assert_allclose(found["up"], expected, rtol=tolerance, atol=tolerance)


def test_what_trains():
    config = LoRAConfig(match=("blocks/up",), train=("head/.*",))
    model = LoRA(toy.BLOCK_MODEL, config).model
    params = jax.eval_shape(model.init, jax.random.key(0))
    frozen = {"embed/table", "blocks/up", "blocks/down", "blocks/scale"}
    assert frozen_by_lora({"lora": config}, params) == LoRA(toy.BLOCK_MODEL, config).frozen == frozen
    assert frozen_by_lora({"lora": {"match": ("blocks/up",), "train": ("head/.*",)}}, params) == frozen
    assert frozen_by_lora({"name": "mlp"}, params) == frozenset()
    own = jax.jit(jax.grad(lambda params: model.loss(params, toy.batch(0), None)[0]))(model.init(jax.random.key(0)))
    assert {path for path, leaf in leaves_with_paths(own) if leaf.any()} == {"head/out", "blocks/lora/up/b"}


# Models that split their own work


TENSOR = ParallelContext(tensor=TensorConfig(size=2))


def test_adapters_are_split_as_what_they_adapt():
    base = transformer(TransformerConfig(vocabulary=16, length=8, layers=2, width=8, heads=2))
    split = LoRA(base, LoRAConfig(match=("blocks/.*", "embed/.*"))).model.parallelize(TENSOR)
    axes = {
        "blocks/lora/attention/query/a": (None, None, None),
        "blocks/lora/attention/query/b": (None, None, "tensor"),
        "blocks/lora/attention/out/a": (None, "tensor", None),
        "blocks/lora/attention/out/b": (None, None, None),
        "embed/lora/tokens/a": ("tensor", None),
        "embed/lora/tokens/b": (None, None),
        "blocks/attention/query": (None, None, "tensor"),
        "blocks/attention/norm": (),
    }
    assert {path: model_axes(split, path) for path in axes} == axes
    assert split.traffic is not None


def test_experts_have_adapters_of_their_own():
    base = moe(MoEConfig(vocabulary=16, length=8, layers=2, width=8, heads=2, experts=4))
    params = jax.eval_shape(LoRA(base, LoRAConfig(rank=2, match=("blocks/mlp/up",))).model.init, jax.random.key(0))
    found = params["blocks"]["lora"]["mlp"]["up"]
    assert found["a"].shape[:3] == (2, 4, 8)
    assert found["a"].shape[3] == found["b"].shape[2] == 2


@pytest.mark.slow
def test_equal_to_one_device(float64):
    base = transformer(TransformerConfig(vocabulary=32, length=8, layers=2, width=8, heads=2))
    config = LoRAConfig(rank=2, match=("blocks/attention/.*", "blocks/mlp/down"), train=("head/norm",))
    strategy = {"data": 2, "fsdp": {"size": 2, "floor_bytes": 0}, "tensor": 2}
    lora, batch = LoRA(base, config), toy.batch(0)
    model, plan = lora.model, toy.plan(strategy, lora.model, precision=toy.FLOAT64, frozen=lora.frozen)
    step = build_step(model, optax.sgd(1.0), plan, precision=toy.FLOAT64)
    program, (params, *expected) = step.compile(toy.abstract(batch)), toy.on_one_device(model, batch, "float64")
    state, metrics = step(step.init(0, params), batch)
    assert_close([metrics.loss, jax.tree.map(np.subtract, params, state.params)], expected)
    assert census(program.as_text(), plan.mesh) == step.cost(toy.abstract(batch))


# By name


def test_in_the_section_of_a_model():
    spec = {"name": "mlp", "widths": (6,), "lora": {"rank": 2, "match": ("layers/.*",)}}
    model = load_model(spec, features=4, classes=3)
    paths = {path for path, _ in leaves_with_paths(jax.eval_shape(model.init, jax.random.key(0)))}
    assert {"layers/0/kernel", "lora/layers/0/kernel/a", "lora/layers/1/kernel/b", "layers/0/bias"} <= paths
    assert not [path for path in paths if path.startswith("lora/layers/0/bias")]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rank": 17}, r"rank=17 is too large for blocks/up of shape \[3, 16, 64\].* at most 16, or narrow"),
        ({"match": ()}, r"model.lora.match is empty: give the matrices"),
        ({"match": ("(",)}, r"model.lora.match: '\(' is not a valid regular expression"),
        ({"match": ("blcks/up",)}, r"model.lora.match: 'blcks/up' matches no parameter. Did you mean blocks/up"),
        (
            {"match": ("blocks/scale",)},
            r"'blocks/scale' does not match any matrix, only blocks/scale of shape \[3, 16\]",
        ),
        ({"match": ("blocks/up",), "train": ("blocks/.*",)}, "blocks/up is both in match and in train"),
        ({"match": ("blocks/up",), "train": ("haed/.*",)}, r"model.lora.train: 'haed/.\*' matches no parameter"),
    ],
)
def test_rejects_invalid_lora_options(config, message):
    with pytest.raises(ValueError, match=message):
        LoRA(toy.BLOCK_MODEL, LoRAConfig(**{"match": ("blocks/up",), **config}))


def test_adapters_of_adapters():
    once = LoRA(toy.BLOCK_MODEL, CONFIG).model
    with pytest.raises(
        ValueError, match=r"model.lora: model 'block model' already has parameters of that name \(blocks/l"
    ):
        LoRA(once, CONFIG)


def counted(lora, strategy, batch, kind, **options):
    """How many collectives of a kind a compiled step on two devices has; all are those that are predicted."""
    layouts = lay_out(lora.model, strategy, devices=toy.devices(2), frozen=lora.frozen)
    shapes = jax.eval_shape(lora.model.init, jax.random.key(0))
    optimizer = make_optimizer(OptimizerConfig(), 10, shapes, frozen=lora.frozen)
    step = build_step(lora.model, optimizer, layouts, **options)
    found = census(step.compile(batch).as_text(), layouts.mesh)
    assert found == step.cost(batch)
    return next(line.count for line in found if line.kind == kind)


@pytest.mark.slow_cases("none")
@pytest.mark.parametrize("remat", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_the_compiled_step_gathers_what_is_predicted(remat):
    """What is kept of W' serves backward in place of W, unless blocks are recomputed."""
    strategy, batch = {"fsdp": {"size": 2, "floor_bytes": 0}}, toy.abstract(toy.batch(0))
    gathers = counted(LoRA(toy.BLOCK_MODEL, CONFIG), strategy, batch, "all-gather", remat=remat)
    outside, of_block = 1 + 1 + 2, ("down", "scale", "a", "b", *(("up",) if remat == "full" else ()))
    assert gathers == outside + toy.BLOCKS * (5 + len(of_block))


@pytest.mark.slow_cases("query|out-12", "query|value-10")
@pytest.mark.parametrize(("match", "count"), [("query|value", 10), ("query|out", 12)])
def test_all_to_alls_that_no_adapter_needs_are_not_made_again(match, count):
    """Products are kept: the way back of the heads is made again for the gradient of `out` alone, if it has one."""
    sizes = {"vocabulary": 16, "layers": 2, "width": 8, "heads": 2, "length": 4}
    lora = LoRA(transformer(TransformerConfig(**sizes)), LoRAConfig(rank=2, match=(f"blocks/attention/({match})",)))
    strategy = {"context": {"size": 2, "attention": "all_to_all"}}
    rows = {"inputs": "int32", "targets": "int32", "weights": "float32"}
    batch = {name: jax.ShapeDtypeStruct((2, 4), dtype) for name, dtype in rows.items()}
    batch["example"] = jax.ShapeDtypeStruct((2,), "int32")
    assert counted(lora, strategy, batch, "all-to-all", remat="dots") == count
