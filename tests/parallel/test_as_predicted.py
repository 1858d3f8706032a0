"""Models as users write them, under every strategy and option that changes what moves: what moves is as predicted."""

from collections import Counter
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from spmdkit.layouts.paths import leaves_with_paths
from spmdkit.models.frozen import freeze, frozen_paths
from spmdkit.models.lora import LoRA, LoRAConfig
from spmdkit.models.moe import MoEConfig, moe
from spmdkit.models.transformer import TransformerConfig, transformer
from spmdkit.parallel import BlockModel, LossSums, Model, Precision, batch_axes, build_step, lay_out
from spmdkit.parallel.sharding.stored_order import unstore_blocks
from spmdkit.parallel.verification.collective_check import check_collectives
from spmdkit.parallel.xla.graph import inner_programs
from spmdkit.training.optimizing.averaging import averaged
from spmdkit.training.optimizing.optimizers import OptimizerConfig, make_optimizer
from support import toy

BLOCKS, ODD = 4, 13
ROWS, FEATURES, CLASSES = 16, 16, 8


def biased(width=64):
    """Two layers with biases, and a scalar parameter."""

    def init(key):
        first, second = jax.random.split(key)
        return {
            "up": {"kernel": jax.random.normal(first, (FEATURES, width)), "bias": jnp.zeros(width)},
            "down": {"kernel": jax.random.normal(second, (width, CLASSES)), "bias": jnp.zeros(CLASSES)},
            "temperature": jnp.ones(()),
        }

    def loss(params, batch, key):
        hidden = jnp.tanh(batch["inputs"] @ params["up"]["kernel"] + params["up"]["bias"][None])
        logits = (hidden @ params["down"]["kernel"] + params["down"]["bias"][None]) * params["temperature"]
        total, weight = toy.cross_entropy(logits, batch)
        hits = ((logits.argmax(-1) == batch["targets"]) * batch["weights"]).sum()
        return total, weight, {"accuracy": (hits, weight)}

    return Model(init=init, loss=loss, name="biased")


def normed(layers=2, shared=True):
    """Batch norms one after the other, with running statistics and a count; not `shared`: each device's own."""

    def init(key):
        keys = jax.random.split(key, layers)
        return {
            "layers": [
                {"kernel": jax.random.normal(each, (FEATURES, FEATURES)), "bias": jnp.zeros(FEATURES)} for each in keys
            ],
            "scale": jnp.ones(FEATURES),
            "out": jax.random.normal(key, (FEATURES, CLASSES)),
        }

    def init_state(key):
        one = {"mean": jnp.zeros(FEATURES), "square": jnp.ones(FEATURES)}
        return {"norms": [one] * layers, "batches": jnp.int32(0)}

    def loss(params, batch, key, state):
        x, axes, after = batch["inputs"], batch_axes() if shared else (), []
        for layer, old in zip(params["layers"], state["norms"], strict=True):
            x = x @ layer["kernel"] + layer["bias"][None]
            new = {"mean": lax.pmean(x.mean(0), axes), "square": lax.pmean((x * x).mean(0), axes)}
            used = old if key is None else new
            x = jnp.tanh((x - used["mean"][None]) * lax.rsqrt(used["square"] - used["mean"] ** 2 + 0.1)[None])
            after.append(jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, old, new))
        total, weight = toy.cross_entropy(x * params["scale"][None] @ params["out"], batch)
        return LossSums(total, weight, {}, {"norms": after, "batches": state["batches"] + 1})

    return Model(init=init, init_state=init_state, loss=loss, name="normed")


def blocks(tied=False, width=toy.WIDTH):
    """Blocks with biases, each matrix over the floor and no vector; `tied`: the embedding is the head too."""
    model = replace(toy.BIASED_MODEL, num_blocks=BLOCKS)

    def init(key):
        params = toy.biased_init(key)
        params = {**params, "blocks": jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf[:1]]), params["blocks"])}
        params = jax.tree.map(lambda leaf: _resized(leaf, width), params)
        return {**params, "head": {}} if tied else params

    head = {"head": toy.tied_head, "head_reads": ("embed",)} if tied else {}
    return replace(model, init=init, **head)


def _resized(leaf, width):
    """The same with dims of `width` in place of those of the toy's."""
    shape = [width if size == toy.WIDTH else size for size in leaf.shape]
    return leaf[tuple(slice(0, size) for size in shape)]


def summing_blocks():
    """Blocks that subtract the mean over all rows of the batch."""

    def block(params, x, key):
        return toy.biased_block(params, x - lax.pmean(x.mean((0, 1)), batch_axes())[None, None], key)

    return replace(blocks(), block=block)


def contrastive():
    """Every row is compared with the rows of all devices."""

    def init(key):
        left, right = jax.random.split(key)
        shape = (FEATURES, 2 * FEATURES)
        return {"left": jax.random.normal(left, shape), "right": jax.random.normal(right, shape)}

    def loss(params, batch, key):
        right = jnp.tanh(batch["inputs"] @ params["right"])
        left = jnp.tanh(batch["inputs"] @ params["left"])
        return compare_with_all(left, right, batch["weights"])

    return Model(init=init, loss=loss, name="contrastive")


def compare_with_all(left, right, weights):
    """A contrastive loss of vectors, whose own places are the largest entries of `same`."""
    own = {"left": left, "right": right, "weights": weights}
    of_all = lax.all_gather(own, batch_axes(), tiled=True)
    scores = jnp.where(of_all["weights"][None, :] > 0, left @ of_all["right"].T, -1e9)
    same = jnp.abs(left[:, None] - of_all["left"][None]).max(axis=-1) == 0
    losses = -jnp.where(same, jax.nn.log_softmax(scores), 0).sum(axis=1)
    return (losses * weights).sum(), weights.sum()


def gathering_blocks():
    """Blocks that add the mean over gathered rows, under a contrastive head."""

    def block(params, x, key):
        of_all = lax.all_gather(x[:, 0], batch_axes(), tiled=True)
        return toy.biased_block(params, x + of_all.mean(axis=0)[None, None], key)

    return replace(blocks(), block=block)


FREEZE, FREEZE_SPLIT = ("embed/.*", "blocks/up"), ("embed/.*", "blocks/mlp/.*")
FREEZE_MLP, FREEZE_BLOCKS = ("blocks/mlp/.*",), ("blocks/.*",)
SPLIT = transformer(TransformerConfig(vocabulary=toy.VOCABULARY, length=8, layers=2, width=16, heads=4))
"""A model that splits its own work over `tensor`."""
UNROLLED = transformer(
    TransformerConfig(vocabulary=toy.VOCABULARY, length=8, layers=2, width=16, heads=4, scan_unroll=2)
)
"""The same without a loop over blocks: XLA knows that nothing needs the gradient of the first block's input."""
SPLIT_MIXTURE = moe(
    MoEConfig(vocabulary=toy.VOCABULARY, length=8, layers=2, width=16, heads=4, experts=2, mlp_width=16)
)


FSDP = {"fsdp": {"size": 4, "floor_bytes": 256}}
HSDP = {"data": 2, "fsdp": {"size": 2, "floor_bytes": 256}}
PREFETCH = {"fsdp": {"size": 4, "floor_bytes": 256, "prefetch": 1}}
WHOLE = {"fsdp": {"size": 4, "floor_bytes": 0}}
STRATEGIES = {
    "data": {"data": 4},
    "zero1": {"data": {"size": 4, "zero": 1, "floor_bytes": 256}},
    "zero2": {"data": {"size": 4, "zero": 2, "floor_bytes": 256}},
    "int8": {"data": {"size": 4, "compress": "int8"}},
    "local": {"data": {"size": 2, "local_steps": 2}, "fsdp": {"size": 2, "floor_bytes": 256}},
    "fsdp": FSDP,
    "all": WHOLE,
    "hsdp": HSDP,
    "keep": {"fsdp": {"size": 4, "floor_bytes": 256, "keep": "step"}},
    "prefetch": PREFETCH,
    "prefetch-all": {"fsdp": {"size": 4, "floor_bytes": 0, "prefetch": 1}},
    "pipe": {"pipe": {"size": 2}, "data": 2},
    "pipe-fsdp": {"pipe": {"size": 2}, "fsdp": {"size": 2, "floor_bytes": 0}},
    "pipe-data-fsdp": {"pipe": {"size": 2}, "data": 2, "fsdp": {"size": 2, "floor_bytes": 256}},  # 8 devices
    "pipe-split": {"pipe": {"size": 2, "embed_and_head": "split"}, "data": 2},
    "tensor": {"data": 2, "tensor": 2},
    "explicit-tensor": {"data": 2, "tensor": 2},
    "ring": {"data": 2, "tensor": {"size": 2, "collective_matmul": True}},
    "fsdp-tensor": {"fsdp": {"size": 2, "floor_bytes": 0}, "tensor": 2},
    "fsdp-explicit-tensor": {"fsdp": {"size": 2, "floor_bytes": 0}, "tensor": 2},
    "keep-explicit-tensor": {"fsdp": {"size": 2, "floor_bytes": 0, "keep": "step"}, "tensor": 2},
    "ring-tensor": {"context": 2, "tensor": {"size": 2, "collective_matmul": True}},
    "ulysses-tensor": {"context": {"size": 2, "attention": "all_to_all"}, "tensor": 2},
}
RULES = {
    "biased": {"up/kernel": (None, "tensor"), "up/bias": ("tensor",), "down/kernel": ("tensor", None)},
    "blocks": {"blocks/up": (None, None, "tensor"), "blocks/down": (None, "tensor", None)},
}
FLOAT32, BFLOAT16 = Precision(), Precision(compute="bfloat16")
SCALED, HALF = Precision(compute="float16"), Precision(compute="float16", reduce="float16", loss_scale=8.0)
MODELS = {
    "biased": biased,
    "odd": lambda: biased(ODD),
    "normed": normed,
    "normed-alone": lambda: normed(shared=False),
    "normed-once": lambda: normed(1),
    "blocks": blocks,
    "tied": lambda: blocks(tied=True),
    "odd-blocks": lambda: blocks(width=ODD),
    "summing": summing_blocks,
    "contrastive": contrastive,
    "gathering": gathering_blocks,
    "lora": lambda: LoRA(blocks(), LoRAConfig(rank=2, match=("blocks/(up|down)",))),
    "frozen": lambda: freeze(blocks(), FREEZE),
    "split lora": lambda: LoRA(SPLIT, LoRAConfig(rank=2, match=("blocks/attention/.*",))),
    "split lora unrolled": lambda: LoRA(UNROLLED, LoRAConfig(rank=2, match=("blocks/.*",))),
    "split frozen": lambda: freeze(SPLIT, FREEZE_SPLIT),
    "split frozen mlp": lambda: freeze(SPLIT, FREEZE_MLP),
    "split frozen mixture": lambda: freeze(SPLIT_MIXTURE, FREEZE_BLOCKS),
}
FREEZES = {
    "frozen": FREEZE,
    "split frozen": FREEZE_SPLIT,
    "split frozen mlp": FREEZE_MLP,
    "split frozen mixture": FREEZE_BLOCKS,
}
OWN_COLLECTIVES = ("normed", "normed-alone", "normed-once", "summing", "contrastive", "gathering")
"""Models whose rows depend on each other, or that have a state."""
PLAIN = ("data", "zero1", "zero2", "int8", "local", "fsdp", "all", "hsdp", "tensor", "fsdp-tensor")
OF_BLOCKS = (*PLAIN, "keep", "prefetch", "prefetch-all", "pipe", "pipe-fsdp", "pipe-data-fsdp", "pipe-split")
ONCE = {"accumulate": 1}
QUICK = [
    ("biased", "hsdp", ONCE),
    ("contrastive", "hsdp", ONCE),
    ("normed", "hsdp", ONCE),
    ("blocks", "prefetch-all", ONCE),
    ("split frozen mlp", "ring-tensor", {"remat": "dots"}),
]
CASES = [
    *QUICK,
    *(("biased", strategy, ONCE) for strategy in PLAIN),
    *(("contrastive", strategy, {"accumulate": 2}) for strategy in ("data", "zero2", "all", "hsdp", "keep")),
    *(("gathering", strategy, ONCE) for strategy in ("data", "zero2", "fsdp", "hsdp", "keep", "prefetch")),
    *(("gathering", strategy, {"remat": "full"}) for strategy in ("data", "fsdp", "hsdp")),
    *(("odd", strategy, ONCE) for strategy in ("data", "zero1", "fsdp", "all", "hsdp")),
    *(("blocks", strategy, ONCE) for strategy in OF_BLOCKS),
    *(("tied", strategy, ONCE) for strategy in ("data", "zero2", "all", "hsdp", "prefetch-all", "pipe-fsdp", "pipe")),
    *(("odd-blocks", strategy, ONCE) for strategy in ("all", "pipe-fsdp")),
    *(("normed", strategy, ONCE) for strategy in ("data", "zero1", "zero2", "fsdp", "all", "hsdp", "int8")),
    *(("normed-alone", strategy, ONCE) for strategy in ("data", "fsdp", "all", "zero2")),
    *(("summing", strategy, ONCE) for strategy in ("data", "hsdp", "all")),
    *((model, strategy, ONCE) for model in ("lora", "frozen") for strategy in OF_BLOCKS if "tensor" not in strategy),
    *((model, "explicit-tensor", ONCE) for model in ("split lora", "split frozen")),
    *(("split frozen", "ring", {"remat": remat}) for remat in ("dots", "selective", "local")),
    *((model, "hsdp", {"accumulate": 2}) for model in ("biased", "blocks", "tied", "normed", "normed-alone", "lora")),
    *((model, "zero2", {"accumulate": 2}) for model in ("biased", "blocks", "normed")),
    ("summing", "hsdp", {"accumulate": 2}),
    ("blocks", "prefetch-all", {"accumulate": 2}),
    ("blocks", "pipe-fsdp", {"accumulate": 2}),
    *(
        (model, strategy, {"remat": remat})
        for model in ("blocks", "lora")
        for strategy in ("all", "pipe-fsdp")
        for remat in ("dots", "full")
    ),
    ("blocks", "prefetch-all", {"remat": "full"}),
    ("summing", "all", {"remat": "full"}),
    *(
        (model, "hsdp", {"precision": precision})
        for model in ("biased", "blocks", "normed")
        for precision in (BFLOAT16, toy.FLOAT64, SCALED)
    ),
    *(("blocks", "pipe-fsdp", {"precision": precision}) for precision in (HALF, BFLOAT16)),
    ("normed-once", "all", {"precision": toy.FLOAT64}),
    ("normed", "fsdp", {"precision": SCALED, "accumulate": 2}),
    ("biased", "hsdp", {"clip_norm": 1.0}),
    ("biased", "all", {"ema": 0.99}),
    ("blocks", "zero1", {"ema": 0.99}),
    *(("split frozen mlp", "ring-tensor", {"remat": remat}) for remat in ("local", "full")),
    *(("split frozen", "ulysses-tensor", {"remat": remat}) for remat in ("dots", "local", "full")),
    *(("split frozen mixture", "ulysses-tensor", {"remat": remat}) for remat in ("dots", "local", "full")),
    *(("split frozen mixture", "ring-tensor", {"remat": "dots", "accumulate": each}) for each in (1, 2)),
    ("split lora unrolled", "fsdp-explicit-tensor", {"remat": "full", "accumulate": 2}),
    ("split lora unrolled", "keep-explicit-tensor", {"remat": "dots"}),
    *(
        ("split lora", strategy, {"remat": remat})
        for strategy in ("fsdp-explicit-tensor", "keep-explicit-tensor")
        for remat in ("dots", "selective", "full")
    ),
    ("normed", "all", {"ema": 0.99}),
    ("biased", "all", {"optimizer": "muon"}),
    ("biased", "zero1", {"optimizer": "adafactor"}),
    ("normed", "all", {"optimizer": "muon"}),
]


def built(name, strategy, *, optimizer="adamw", ema=0.0, precision=FLOAT32, **options):
    """A step on the devices that the strategy takes."""
    given, frozen, rules, freezing = MODELS[name](), frozenset(), None, ()
    if isinstance(given, LoRA):
        given, frozen = given.model, given.frozen
    elif "frozen" in name:
        freezing = FREEZES[name]
        frozen = frozen_paths(freezing, jax.eval_shape(given.init, jax.random.key(0)))
    if "tensor" in STRATEGIES[strategy] and getattr(given, "parallelize", None) is None:
        rules = RULES["blocks" if isinstance(given, BlockModel) else "biased"]
    layouts = lay_out(
        given,
        STRATEGIES[strategy],
        rules=rules,
        precision=precision,
        devices=toy.devices(8 if strategy == "pipe-data-fsdp" else 4),
        frozen=frozen,
        indivisible="replicate",
    )
    shapes = jax.eval_shape(given.init, jax.random.key(0))
    config = OptimizerConfig(name=optimizer, learning_rate=1e-3, freeze=freezing)
    chosen = make_optimizer(config, 10, shapes, frozen=frozen, stacked=isinstance(given, BlockModel))
    chosen = averaged(chosen, ema) if ema else chosen
    return build_step(given, chosen, layouts, precision=precision, **options)


def rows_of(step):
    """Shapes of a batch of the model."""
    if isinstance(step.given_model, BlockModel):
        return toy.abstract(toy.batch(0))
    number = jax.ShapeDtypeStruct((ROWS,), "float32")
    return {
        "inputs": jax.ShapeDtypeStruct((ROWS, FEATURES), "float32"),
        "targets": jax.ShapeDtypeStruct((ROWS,), "int32"),
        "weights": number,
    }


def case_name(case):
    model, strategy, options = case
    told = "-".join(
        f"{key} {f'{value.compute} {value.reduce}' if isinstance(value, Precision) else value}"
        for key, value in options.items()
    )
    return f"{model}, {strategy}, {told}"


TABLE = {case_name(case): case for case in CASES}


@pytest.mark.slow_cases(
    "biased, hsdp, accumulate 1", "blocks, prefetch-all, accumulate 1", "split frozen mlp, ring-tensor, remat dots"
)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if case in QUICK else pytest.mark.long) for name, case in TABLE.items()]
)
def test_census_equals_the_predicted_cost(name):
    model, strategy, options = TABLE[name]
    precision = options.get("precision", FLOAT32)
    with jax.enable_x64(precision.needs_x64):
        step = built(model, strategy, **options)
        moved = check_collectives(step, rows_of(step))
        assert moved.unexpected == moved.fewer == ()
        assert bool(moved.of_the_model) == (model in OWN_COLLECTIVES)
        if "optimizer" not in options:  # collectives of the update can be of the same kind over the same axes
            assert not moved.has_unpredicted_of_the_model
        if strategy not in ("tensor", "fsdp-tensor") and "optimizer" not in options:
            assert moved.found == moved.predicted != ()


REDUCTIONS = {"reduce_scatter": "reduce-scatter", **dict.fromkeys(("psum", "psum_invariant", "pmax"), "all-reduce")}


def reduced_by(jaxpr, times=1):
    """Bytes that a traced program reduces, before any compiler has seen it, by kind; the turns of loops counted."""
    found = Counter()
    for eqn in jaxpr.eqns:
        if kind := REDUCTIONS.get(eqn.primitive.name):
            found[kind] += times * sum(leaf.aval.size * leaf.aval.dtype.itemsize for leaf in eqn.invars)
        for inner in inner_programs(eqn):
            found += reduced_by(inner, times * eqn.params.get("length", 1))
    return found


@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        *(("frozen", strategy) for strategy in ("data", "fsdp", "zero1", "hsdp")),
        ("split frozen", "explicit-tensor"),
        *(pytest.param("frozen", each, marks=pytest.mark.slow) for each in ("zero2", "local", "keep", "prefetch")),
        *(pytest.param("lora", each, marks=pytest.mark.slow) for each in ("fsdp", "prefetch", "pipe")),
        pytest.param("split lora", "explicit-tensor", marks=pytest.mark.slow),
    ],
)
def test_a_program_never_holds_gradients_of_frozen_parameters(model, strategy):
    """Not even before XLA takes out what nobody reads, and sums of zeros."""
    step = built(model, strategy)
    predicted = Counter()
    for line in step.cost(rows_of(step)):
        if line.kind in REDUCTIONS.values():
            predicted[line.kind] += line.bytes
    state = step.abstract_state(abstract=True)
    assert reduced_by(step._jit_step(abstract=True).trace(state, rows_of(step)).jaxpr.jaxpr) == predicted


@cache
def on_one_device(name):
    """Parameters of a model that is frozen in part, and the gradients of its mean loss by path."""
    model = getattr(MODELS[name](), "model", None) or MODELS[name]()
    params, _, gradients = toy.on_one_device(model, toy.batch(0))
    return params, dict(leaves_with_paths(gradients))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["prefetch", "hsdp", "keep", "zero2", "pipe-fsdp"])
@pytest.mark.parametrize("model", ["lora", "frozen"])
def test_trained_parameters_have_the_gradients_of_one_device(model, strategy):
    """And what does not has zeros, whatever the optimizer makes of them."""
    step, (params, expected) = built(model, strategy, accumulate=2), on_one_device(model)
    found, _ = step.gradients(step.init(0, params), toy.batch(0))
    pipeline = step.plan.pipeline
    found = found if pipeline is None else {**found, "blocks": unstore_blocks(found["blocks"], pipeline.stages)}
    for path, leaf in leaves_with_paths(found):
        assert bool(expected[path].any()) is (path not in step.plan.frozen)
        np.testing.assert_allclose(leaf, expected[path], rtol=1e-4, atol=1e-6)
